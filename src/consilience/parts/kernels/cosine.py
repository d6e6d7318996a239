"""The cosine classifier as one fused CUDA kernel forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.derivatives import first_order, transformed
from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EPS = 1e-12                 # least norm, as in F.normalize
BATCH = 1 << 12             # rows: in the backward pass a program walks all of them
TILE = 16                   # rows it takes at a time

if triton is not None:
    @triton.jit
    def _unit(x, k, d, wide, D, EPS: tl.constexpr):
        """One row over its norm, the norm, and whether it stands for more than the constant ε."""
        value = tl.load(x + k * D + d, mask=wide, other=0.0)
        long = tl.sqrt_rn(tl.sum(value * value, 0))
        norm = tl.maximum(long, EPS)
        return value / norm, norm, long >= EPS

    @triton.jit
    def _units(x, n, N, d, wide, D, EPS: tl.constexpr):
        """Some rows over their norms."""
        value = tl.load(x + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & wide[None, :], other=0.0)
        return value / tl.maximum(tl.sqrt_rn(tl.sum(value * value, 1)), EPS)[:, None]

    @triton.jit
    def _forward(u, w, out, C, D, scale, EPS: tl.constexpr, TILE: tl.constexpr, DD: tl.constexpr):
        """One row against all classes."""
        at, d = tl.program_id(0), tl.arange(0, DD)
        wide = d < D
        unit, _norm, _bends = _unit(u, at, d, wide, D, EPS)
        for start in range(0, C, TILE):
            c = start + tl.arange(0, TILE)
            near = tl.sum(_units(w, c, C, d, wide, D, EPS) * unit[None, :], 1)
            tl.store(out + at * C + c, near * scale, mask=c < C)

    @triton.jit
    def _row(x, others, grad, out, k, stride, step, N, D, scale, EPS: tl.constexpr, TILE: tl.constexpr, DD: tl.constexpr):
        """∂ of row k of x: with ∂û = scale·Σ_n grad[k·stride + n·step]·(others_n/‖others_n‖), it is (∂û − û⟨û, ∂û⟩)/‖x_k‖."""
        d = tl.arange(0, DD)
        wide = d < D
        total = tl.zeros((DD,), tl.float32)
        for start in range(0, N, TILE):
            n = start + tl.arange(0, TILE)
            g = tl.load(grad + k * stride + n * step, mask=n < N, other=0.0)
            total += tl.sum(_units(others, n, N, d, wide, D, EPS) * g[:, None], 0)
        total *= scale
        unit, norm, bends = _unit(x, k, d, wide, D, EPS)
        along = tl.where(bends, tl.sum(unit * total, 0), 0.0)
        tl.store(out + k * D + d, (total - unit * along) / norm, mask=wide)

    @triton.jit
    def _backward(u, w, grad, du, dw, B, C, D, scale, of_rows, EPS: tl.constexpr, TILE: tl.constexpr, DD: tl.constexpr):
        """A program for every row's gradient, then one for every class's weights."""
        at = tl.program_id(0)
        if at < of_rows:
            _row(u, w, grad, du, at, C, 1, C, D, scale, EPS, TILE, DD)
        else:
            _row(w, u, grad, dw, at - of_rows, 1, C, B, D, scale, EPS, TILE, DD)


def usable(u: Tensor, w: Tensor) -> bool:
    return (u.dim() == 2 and fused.ready(u, w, width=u.shape[1], classes=len(w)) and len(u) <= BATCH
            and not torch.is_autocast_enabled(u.device.type) and not transformed())


class _Cosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor, scale: float) -> Tensor:
        (b, d), c = u.shape, len(w)
        out = u.new_empty(b, c)
        fused.launch(_forward, b, u, w, out, c, d, scale, EPS, TILE, fused.above(d))
        ctx.save_for_backward(u, w)
        ctx.scale = scale
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        u, w = ctx.saved_tensors
        (b, d), c = u.shape, len(w)
        rows, classes = (b if ctx.needs_input_grad[0] else 0), (c if ctx.needs_input_grad[1] else 0)
        du, dw = torch.empty_like(u), torch.empty_like(w)
        fused.launch(_backward, rows + classes, u, w, grads[0].contiguous(), du, dw, b, c, d, ctx.scale, rows, EPS, TILE,
                      fused.above(d))
        return du if rows else None, dw if classes else None, None


def cosines(u: Tensor, w: Tensor, scale: float) -> Tensor:
    """⟨u/‖u‖, w/‖w‖⟩·scale for every row of u and every row of w."""
    out: Tensor = _Cosines.apply(u, w, scale)
    return out
