"""Max-pooling of maps whose channels lie side by side, one CUDA kernel each way. Forward the numbers are PyTorch's, bit for bit;
backward they are its sums in float32, rounded once.

PyTorch's way back fills the map with zeros first and keeps most of a GPU busy for longer than a convolution: 13 µs for the 3×3 pooling of
ResNet-18's stem on 64 images of 32×32. Here a program of the way back asks, for some numbers of the map, which of the windows around them
chose them; a window notes its choice in a byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 1 << 10             # numbers of one program
MOST_NUMBERS = (1 << 31) - BLOCK
MOST_SIDE = 15              # of a window: a place in it fits into a byte

if triton is not None:
    @triton.jit
    def _where(j, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
        """Sample, row, column and channel of number j."""
        position = j // C
        line = position // W
        return line // H, line % H, position % W, j % C

    @triton.jit
    def _forward(x, out, place, count, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, C: tl.constexpr,
                 SIDE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
        j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = j < count
        n, high, wide, c = _where(j, PH, PW, C)
        top, left = high * STEP - PAD, wide * STEP - PAD
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        which = tl.maximum(-top, 0) * SIDE + tl.maximum(-left, 0)          # the first that is there, should none be larger
        for k in tl.static_range(SIDE * SIDE):
            h, w = top + k // SIDE, left + k % SIDE
            inside = here & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((n * H + h) * W + w) * C + c, mask=inside, other=float("-inf")).to(tl.float32)
            better = inside & ((value > best) | (value != value))          # the first of equals, and not-a-number, as PyTorch has it
            best, which = tl.where(better, value, best), tl.where(better, k, which)
        tl.store(out + j, best.to(out.dtype.element_ty), mask=here)
        tl.store(place + j, which.to(tl.uint8), mask=here)

    @triton.jit
    def _backward(grad, place, back, count, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, C: tl.constexpr,
                  SIDE: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
        AROUND: tl.constexpr = (SIDE + STEP - 1) // STEP                   # windows, along one side, that may hold a number
        j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n, h, w, c = _where(j, H, W, C)
        last, far = (h + PAD) // STEP, (w + PAD) // STEP
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(AROUND * AROUND):                         # from the first window to the last, as PyTorch sums
            high, wide = last - (AROUND - 1 - k // AROUND), far - (AROUND - 1 - k % AROUND)
            row, column = h + PAD - high * STEP, w + PAD - wide * STEP
            inside = (j < count) & (high >= 0) & (high < PH) & (wide >= 0) & (wide < PW) & (row < SIDE) & (column < SIDE)
            source = ((n * PH + high) * PW + wide) * C + c
            chosen = inside & (tl.load(place + source, mask=inside, other=255).to(tl.int32) == row * SIDE + column)
            total += tl.load(grad + source, mask=chosen, other=0.0).to(tl.float32)
        tl.store(back + j, total.to(back.dtype.element_ty), mask=j < count)


def usable(x: Tensor, side: Any, step: Any, pad: Any, dilation: Any, ceil_mode: bool) -> bool:
    """Whether the kernels compute what the layer would: square windows that PyTorch takes, and maps of the kind above."""
    if triton is None or not x.is_cuda or x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 4:
        return False
    numbers = all(isinstance(n, int) for n in (side, step, pad)) and dilation in (1, (1, 1)) and not ceil_mode
    if not numbers or not 1 <= side <= MOST_SIDE or step < 1 or not 0 <= pad <= side // 2 or min(x.shape[2:]) + 2 * pad < side:
        return False
    turned = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return turned and 0 < x.numel() < MOST_NUMBERS


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int, step: int, pad: int) -> Tensor:
        n, c, h, w = x.shape
        high, wide = ((size + 2 * pad - side) // step + 1 for size in (h, w))
        out = torch.empty((n, c, high, wide), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        place = torch.empty_like(out, dtype=torch.uint8)
        ctx.how = h, w, high, wide, c, side, step, pad, BLOCK
        with torch.cuda.device_of(x):
            _forward[(-(-out.numel() // BLOCK),)](x, out, place, out.numel(), *ctx.how, num_warps=4)
        ctx.save_for_backward(place)
        ctx.shape = x.shape
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=torch.channels_last)
        back = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        with torch.cuda.device_of(g):
            _backward[(-(-back.numel() // BLOCK),)](g, place, back, back.numel(), *ctx.how, num_warps=4)
        return back, None, None, None


def max_pool(x: Tensor, side: int, step: int, pad: int) -> Tensor:
    """The largest number of each window, where `usable`."""
    return _Pooled.apply(x, side, step, pad)
