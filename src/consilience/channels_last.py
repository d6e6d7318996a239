"""Maps whose channels lie next to each other (channels_last). PyTorch's layers look at the strides to choose their kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor) -> Tensor:
    """x with the channels next to each other. Where there is one channel, only the strides say so, and `contiguous` leaves them alone."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = x.shape
    return x.reshape(n, h, w, c).permute(0, 3, 1, 2)


def is_turned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(3) == x.shape[1]


def fills_memory(x: Tensor) -> bool:
    """Whether a tensor's numbers lie without gaps, in PyTorch's order or with the channels next to each other."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
