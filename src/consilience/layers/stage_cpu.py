"""Convolution, ReLU and max-pooling as one on CPUs, a vector of channels at a time whatever the layout outside.

PyTorch's pooling compares one number at a time unless the channels lie next to each other, so the maps are turned where they are
smallest: before the convolution and after the pooling. The largest number of a window is taken first and the ReLU after it, on a quarter
of the numbers. That is the same: where the largest is positive, it is the same number from the same place, and where it is not, nothing
comes through and no gradient goes back. Every operation is PyTorch's own, so gradients of gradients are there too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..channels_last import turned

FEWEST_CHANNELS = 16            # a vector of channels to compare at once
_TYPES = (torch.float32, torch.bfloat16)


def usable(x: Tensor, conv: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    """Whether the host computes here, in a precision that oneDNN has, and the maps have channels enough."""
    return (x.device.type == "cpu" and x.dim() == 4 and conv.out_channels >= FEWEST_CHANNELS and x.dtype in _TYPES
            and not pool.return_indices and torch.backends.mkldnn.is_available() and not torch.jit.is_tracing())


def conv_relu_pool(x: Tensor, conv: nn.Conv2d, pool: nn.MaxPool2d) -> Tensor:
    """The largest numbers of the windows of relu(conv(x)), with the channels together. `conv` is PyTorch's layer or that of `bfloat16`."""
    if type(conv) is nn.Conv2d and conv.padding_mode == "zeros":
        maps = torch.conv2d(turned(x), turned(conv.weight), conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    else:
        maps = conv(turned(x))
    return torch.max_pool2d(maps, pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode).relu_()
