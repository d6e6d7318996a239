"""Triton kernels of single parts, each under the name of its part; the formula in tensor operations stays in the part.

They see tensors alone, as those of `consilience.kernels` do. What several of them need is in `fused`.
"""
