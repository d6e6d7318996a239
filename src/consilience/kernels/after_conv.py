"""What follows a convolution, its bias, a ReLU and 2×2 pooling, as one CUDA kernel forward and one or two backward.

PyTorch launches three forward and four backward, and sums the bias's gradient slowly: in VGG11 these took a third of a step. The
convolution itself stays with cuDNN. Maps are float32 or bfloat16, rounded where PyTorch rounds them, so forward the numbers are its own. A
program owns some channels and some positions; where programs share a channel they leave partial sums, which the second kernel adds in a
fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..channels_last import is_turned
from .batch_norm import MOST_PROGRAMS, above, layout
from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 1 << 11              # numbers a program holds at once
EACH = 1 << 12              # numbers of one program where several share a channel
ALONE = 1 << 9              # positions that one program walks by itself: a second launch would cost more than it saves
MOST_NUMBERS = (1 << 31) - (1 << 16)       # of a map: places are int32, and the last program reaches beyond the end

if triton is not None:
    @triton.jit
    def _tile(start, end, c, C, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, STEP: tl.constexpr,
              LAST: tl.constexpr, ROWS: tl.constexpr):
        """Of positions start to end that come out: where they lie, where the first of the numbers they come from lies, and which are there.
        Channels lie along the axis that memory runs along: the second in channels_last, else the first."""
        m = start + tl.arange(0, ROWS)
        n, p = m // (PH * PW), m % (PH * PW)
        inside = (p // PW) * (STEP * W) + (p % PW) * STEP
        if LAST:
            out, source = m[:, None] * C + c[None, :], (n * (H * W) + inside)[:, None] * C + c[None, :]
            there = (m < end)[:, None] & (c < C)[None, :]
        else:
            out = c[:, None] * (PH * PW) + (n * (C * PH * PW) + p)[None, :]
            source = c[:, None] * (H * W) + (n * (C * H * W) + inside)[None, :]
            there = (c < C)[:, None] & (m < end)[None, :]
        return out, source, there

    @triton.jit
    def _along(values, LAST: tl.constexpr):
        """One number a channel, laid along the channels of a tile."""
        return values[None, :] if LAST else values[:, None]

    @triton.jit
    def _shown(raw, source, there, shift):
        """relu(raw + bias), rounded to the map's type after the sum as PyTorch does; not-a-number stays what it is."""
        value = tl.load(raw + source, mask=there, other=0.0).to(tl.float32) + shift
        value = value.to(raw.dtype.element_ty).to(tl.float32)
        return tl.where(value < 0.0, 0.0, value)

    @triton.jit
    def _forward(raw, bias, out, place, M, EACH, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 POOL: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        STEP: tl.constexpr = 2 if POOL else 1
        RIGHT: tl.constexpr = C if LAST else 1
        c, first = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1) * EACH
        end = tl.minimum(M, first + EACH)
        shift = _along(tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32), LAST)
        for start in range(first, end, ROWS):
            target, source, there = _tile(start, end, c, C, H, W, PH, PW, STEP, LAST, ROWS)
            best = _shown(raw, source, there, shift)
            if POOL:
                which = tl.zeros_like(best).to(tl.int32)
                for k in tl.static_range(1, 4):
                    value = _shown(raw, source + (k // 2) * (W * RIGHT) + (k % 2) * RIGHT, there, shift)
                    better = (value > best) | (value != value)          # the first of equals, and not-a-number, as PyTorch has it
                    best, which = tl.where(better, value, best), tl.where(better, k, which)
                tl.store(place + target, tl.where(best <= 0.0, 4, which).to(tl.uint8), mask=there)
            tl.store(out + target, best.to(out.dtype.element_ty), mask=there)

    @triton.jit
    def _backward(grad, out, place, back, sums, M, EACH, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr,
                  PW: tl.constexpr, POOL: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        """The gradient before ReLU and pooling, and this program's share of its sum over positions."""
        STEP: tl.constexpr = 2 if POOL else 1
        RIGHT: tl.constexpr = C if LAST else 1
        c, first = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1) * EACH
        end = tl.minimum(M, first + EACH)
        if LAST:
            total = tl.zeros((ROWS, COLS), tl.float32)
        else:
            total = tl.zeros((COLS, ROWS), tl.float32)
        for start in range(first, end, ROWS):
            source, target, there = _tile(start, end, c, C, H, W, PH, PW, STEP, LAST, ROWS)
            g = tl.load(grad + source, mask=there, other=0.0).to(tl.float32)
            if POOL:
                which = tl.load(place + source, mask=there, other=4).to(tl.int32)
                for k in tl.static_range(4):
                    here = tl.where(which == k, g, 0.0)
                    tl.store(back + target + (k // 2) * (W * RIGHT) + (k % 2) * RIGHT, here.to(back.dtype.element_ty), mask=there)
                g = tl.where(which == 4, 0.0, g)
            else:
                g = tl.where(tl.load(out + source, mask=there, other=0.0).to(tl.float32) <= 0.0, 0.0, g)
                tl.store(back + target, g.to(back.dtype.element_ty), mask=there)
            total += g
        tl.store(sums + tl.program_id(1) * C + c, tl.sum(total, 0 if LAST else 1).to(sums.dtype.element_ty), mask=c < C)

    @triton.jit
    def _add_up(partials, out, pieces, C, ROWS: tl.constexpr, COLS: tl.constexpr):
        c = tl.program_id(0) * COLS + tl.arange(0, COLS)
        total = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, pieces, ROWS):
            p = start + tl.arange(0, ROWS)
            total += tl.load(partials + p[:, None] * C + c[None, :], mask=(p < pieces)[:, None] & (c < C)[None, :], other=0.0)
        tl.store(out + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < C)


def usable(x: Tensor) -> bool:
    """Whether what a convolution of x gives can be finished here."""
    return triton is not None and x.is_cuda and x.dim() == 4 and x.dtype in (torch.float32, torch.bfloat16) and not torch.jit.is_tracing()


class _Geometry:
    """How the programs of a launch divide a map among them."""

    def __init__(self, raw: Tensor, pool: bool) -> None:
        n, c, h, w = raw.shape
        ph, pw = (h // 2, w // 2) if pool else (h, w)
        self.out, self.m = (n, c, ph, pw), n * ph * pw
        last = layout(raw) is torch.channels_last
        cols = min(above(c), 32 if last else 2)
        rows = min(above(self.m), TILE // cols)
        tiles = -(-self.m // rows)
        self.each = rows * (tiles if self.m <= ALONE else max(EACH // (rows * cols), -(-tiles // MOST_PROGRAMS)))
        self.pieces = -(-self.m // self.each)
        self.grid = -(-c // cols), self.pieces
        self.how = {"C": c, "H": h, "W": w, "PH": ph, "PW": pw, "POOL": pool, "LAST": last, "ROWS": rows, "COLS": cols, "num_warps": 4}


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, bias: Tensor, pool: bool) -> Tensor:
        # by strides: maps of one channel or one position lie the same either way, and the layers behind look at strides
        form = torch.channels_last if is_turned(raw) else torch.contiguous_format
        raw = raw.contiguous(memory_format=form)
        at = _Geometry(raw, pool)
        out = torch.empty(at.out, dtype=raw.dtype, device=raw.device, memory_format=form)
        place = torch.empty_like(out, dtype=torch.uint8) if pool else out
        with torch.cuda.device_of(raw):
            _forward[at.grid](raw, bias, out, place, at.m, at.each, **at.how)
        ctx.save_for_backward(place)
        ctx.shape, ctx.form, ctx.pool, ctx.bias = raw.shape, form, pool, bias.dtype
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=ctx.form)
        odd = ctx.pool and (ctx.shape[2] % 2 or ctx.shape[3] % 2)            # the last row or column is in no window
        back = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=ctx.form)
        if odd:
            back.zero_()
        at = _Geometry(back, ctx.pool)
        total = torch.empty(ctx.shape[1], dtype=ctx.bias, device=g.device)
        sums = total if at.pieces == 1 else torch.empty(at.pieces, ctx.shape[1], dtype=torch.float32, device=g.device)
        with torch.cuda.device_of(g):
            _backward[at.grid](g, place, place, back, sums, at.m, at.each, **at.how)
            if at.pieces > 1:
                _add_up[(-(-ctx.shape[1] // 16),)](sums, total, at.pieces, ctx.shape[1], ROWS=64, COLS=16)
        return back, total, None


def bias_relu_pool(raw: Tensor, bias: Tensor, pool: bool) -> Tensor:
    """relu(raw + bias), and where `pool` says so the largest number of each 2×2 window."""
    if raw.numel() >= MOST_NUMBERS or not raw.numel() or (pool and min(raw.shape[2:]) < 2):
        maps = F.relu(raw + bias[:, None, None])
        return F.max_pool2d(maps, 2) if pool else maps
    return _Finish.apply(raw, bias, pool)
