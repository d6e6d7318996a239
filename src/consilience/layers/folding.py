"""A strided convolution of few channels as one of many channels without a stride.

In bfloat16 cuDNN computes with eight channels or more: it pads the three of a picture, in kernels of its own, on the way there and once
more for the gradient of the weights. Folded, a square of 2 × 2 pixels is one position with 4 × 4 channels, the fourth of each pixel being
zero: nothing is left to pad, and a 7 × 7 kernel of stride 2 has 4 · 4 · 16 products a position in place of 7 · 7 · 8. The products are the
same but for zeros; the order of their sum is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDE = 2
CHANNELS = 4                    # of a pixel, with those that are zero


class Fold(NamedTuple):
    """Along one side: squares before the image and squares in all; zeros before and after the kernel, which then begins with a square."""

    before: int
    squares: int
    front: int
    back: int


def fold_of(conv: nn.Conv2d, height: int, width: int) -> tuple[Fold, Fold] | None:
    """How a convolution of such maps is folded; None where it is not to be."""
    if (conv.in_channels > CHANNELS or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str)
            or conv.stride != (STRIDE, STRIDE) or conv.dilation != (1, 1)):
        return None
    rows, columns = (_side(size, kernel, padding) for size, kernel, padding in zip((height, width), conv.kernel_size, conv.padding))
    return None if rows is None or columns is None else (rows, columns)


def _side(size: int, kernel: int, padding: int) -> Fold | None:
    front = padding % STRIDE                            # the image has to begin with a square as well
    back = (front + kernel) % STRIDE
    before, taps = (padding + front) // STRIDE, (front + kernel + back) // STRIDE
    squares = (size + 2 * padding - kernel) // STRIDE + taps
    fits = size % STRIDE == 0 and size + 2 * padding >= kernel and squares >= before + size // STRIDE
    return Fold(before, squares, front, back) if fits else None


def folded(x: Tensor, weight: Tensor, bias: Tensor | None, fold: tuple[Fold, Fold], dtype: torch.dtype) -> Tensor:
    """The convolution, computed in `dtype`. Its maps have their channels side by side."""
    rows, columns = fold
    n, channels, height, width = x.shape
    room = x.new_zeros((n, rows.squares, columns.squares, STRIDE, STRIDE, CHANNELS), dtype=dtype)
    high, wide = height // STRIDE, width // STRIDE
    room[:, rows.before: rows.before + high, columns.before: columns.before + wide, ..., :channels] = (
        x.reshape(n, channels, high, STRIDE, wide, STRIDE).permute(0, 2, 4, 3, 5, 1))
    kernel = F.pad(weight.to(dtype), (columns.front, columns.back, rows.front, rows.back, 0, CHANNELS - channels))
    out, _, *taps = kernel.shape
    kernel = kernel.reshape(out, CHANNELS, taps[0] // STRIDE, STRIDE, taps[1] // STRIDE, STRIDE).permute(0, 2, 4, 3, 5, 1)
    return F.conv2d(_with_channels(room), _with_channels(kernel), bias)


def _with_channels(squares: Tensor) -> Tensor:
    """(n, rows, columns, pixels down, pixels across, channels) as maps whose channels lie side by side."""
    return squares.flatten(3).permute(0, 3, 1, 2)
