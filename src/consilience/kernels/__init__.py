"""Triton kernels of our own, for what PyTorch takes many kernels for: layers, the loss, SGD, random numbers, a batch with its transform.

Tensors go in and tensors come out, at most beside one of PyTorch's own layers. Nothing here knows models, methods or rounds; kernels of
one part alone are in `parts/kernels`. Most files say with `usable` what their kernels take; for the rest, and where Triton is missing,
whoever calls them has PyTorch's operations. Two files hold no kernel: `derivatives` says where kernels stand aside, and `reach` what of a
convolution's weights ever meets the map.
"""
