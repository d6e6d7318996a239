"""A model's first convolution in bfloat16, on images of few channels, as one CUDA kernel forward and two backward.

cuDNN's kernels want eight channels. For images of three it pads image and weights, forward and again for the gradient, with kernels that
keep a whole GPU busy: of ResNet-18's step on 32×32 images that was a sixth. Here programs pick the patches themselves, cast them on the way
as autocast would, and sum in float32. Images have no gradient, so there is none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._once import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MOST_CHANNELS, MOST_WEIGHTS, MOST_FILTERS = 4, 256, 128       # of an image; of one filter; that one program computes
ROWS = 64                   # positions that a program takes at a time
EACH = 256                  # positions whose share of the weights' gradient one program sums
AT_ONCE = 32                # weights of a filter that it takes at a time
MOST_NUMBERS = (1 << 31) - (1 << 16)

if triton is not None:
    PRODUCT = tl.bfloat16   # of which products are taken; Triton's interpreter knows none of bfloat16

    @triton.jit
    def _patches(x, m, k, end, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, C: tl.constexpr,
                 SIDE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr):
        """What weights k of a filter meet at positions m, in bfloat16; zeros where that is padding."""
        p = m % (PH * PW)
        h = ((p // PW) * STEP - PAD)[:, None] + (k // (SIDE * C))[None, :]
        w = ((p % PW) * STEP - PAD)[:, None] + ((k // C) % SIDE)[None, :]
        there = (m < end)[:, None] & (k < SIDE * SIDE * C)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        place = (((m // (PH * PW)) * H)[:, None] + h) * W + w
        return tl.load(x + place * C + (k % C)[None, :], mask=there, other=0.0).to(tl.bfloat16)

    @triton.jit
    def _forward(x, weight, y, M, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, C: tl.constexpr, CO: tl.constexpr,
                 SIDE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, AT_ONCE: tl.constexpr,
                 PRODUCT: tl.constexpr):
        K: tl.constexpr = SIDE * SIDE * C
        m, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
        total = tl.zeros((ROWS, COLS), tl.float32)
        for start in tl.static_range(0, K, AT_ONCE):
            k = start + tl.arange(0, AT_ONCE)
            patches = _patches(x, m, k, M, H, W, PH, PW, C, SIDE, STEP, PAD)
            filters = tl.load(weight + c[None, :] * K + k[:, None], mask=(k < K)[:, None] & (c < CO)[None, :], other=0.0)
            total = tl.dot(patches.to(PRODUCT), filters.to(PRODUCT), total)
        tl.store(y + m[:, None] * CO + c[None, :], total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (c < CO)[None, :])

    @triton.jit
    def _weights(x, grad, partials, M, EACH, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, C: tl.constexpr,
                 CO: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                 AT_ONCE: tl.constexpr, PRODUCT: tl.constexpr):
        """This program's share of the weights' gradient."""
        K: tl.constexpr = SIDE * SIDE * C
        first, k, c = tl.program_id(0) * EACH, tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, COLS)
        end = tl.minimum(M, first + EACH)
        total = tl.zeros((COLS, AT_ONCE), tl.float32)
        for start in range(first, end, ROWS):
            m = start + tl.arange(0, ROWS)
            patches = _patches(x, m, k, end, H, W, PH, PW, C, SIDE, STEP, PAD)
            g = tl.load(grad + m[None, :] * CO + c[:, None], mask=(m < end)[None, :] & (c < CO)[:, None], other=0.0)
            total = tl.dot(g.to(PRODUCT), patches.to(PRODUCT), total)
        place = (tl.program_id(0) * CO + c)[:, None] * K + k[None, :]
        tl.store(partials + place, total, mask=(c < CO)[:, None] & (k < K)[None, :])

    @triton.jit
    def _add_up(partials, out, pieces, count, ROWS: tl.constexpr, COLS: tl.constexpr):
        j = tl.program_id(0) * COLS + tl.arange(0, COLS)
        total = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, pieces, ROWS):
            p = start + tl.arange(0, ROWS)
            total += tl.load(partials + p[:, None] * count + j[None, :], mask=(p < pieces)[:, None] & (j < count)[None, :], other=0.0)
        tl.store(out + j, tl.sum(total, 0).to(out.dtype.element_ty), mask=j < count)


def usable(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute what autocast's convolution of x with a weight in bfloat16 would. A bias is added by others."""
    if triton is None or not x.is_cuda or x.dim() != 4 or x.dtype not in (torch.float32, torch.bfloat16) or torch.jit.is_tracing():
        return False
    if weight.dtype != torch.bfloat16 or (x.requires_grad and torch.is_grad_enabled()):
        return False
    side, step, pad = conv.kernel_size, conv.stride, conv.padding
    square = side[0] == side[1] and step[0] == step[1] and not isinstance(pad, str) and pad[0] == pad[1]
    if not square or conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or weight.shape[2:] != conv.kernel_size:
        return False
    filters, channels = weight.shape[:2]
    if channels > MOST_CHANNELS or weight[0].numel() > MOST_WEIGHTS or filters > MOST_FILTERS:
        return False
    if x.shape[1] != channels or min(x.shape[2:]) + 2 * int(pad[0]) < side[0]:
        return False                                  # PyTorch says what is wrong
    turned = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return turned and 0 < x.numel() < MOST_NUMBERS and len(x) * filters * x.shape[2] * x.shape[3] < MOST_NUMBERS


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, step: int, pad: int) -> Tensor:
        (n, c, h, w), (filters, side) = x.shape, (weight.shape[0], weight.shape[2])
        high, wide = ((size + 2 * pad - side) // step + 1 for size in (h, w))
        y = torch.empty((n, filters, high, wide), dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
        cols = max(16, 1 << (filters - 1).bit_length())
        ctx.how = h, w, high, wide, c, filters, side, step, pad
        ctx.tiles = {"ROWS": ROWS, "COLS": cols, "AT_ONCE": AT_ONCE, "PRODUCT": PRODUCT, "num_warps": 4}
        with torch.cuda.device_of(x):
            _forward[(-(-n * high * wide // ROWS),)](x, weight, y, n * high * wide, *ctx.how, **ctx.tiles)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=torch.channels_last)
        m, out = g.numel() // g.shape[1], torch.empty_like(weight)
        pieces, count = -(-m // EACH), weight.numel()
        partials = torch.empty(pieces, count, dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _weights[(pieces, -(-count // len(weight) // AT_ONCE))](x, g, partials, m, EACH, *ctx.how, **ctx.tiles)
            _add_up[(-(-count // 32),)](partials, out, pieces, count, ROWS=32, COLS=32, num_warps=4)
        return None, out, None, None


def convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution without its bias, where `usable`."""
    return _Convolved.apply(x, weight, conv.stride[0], conv.padding[0])
