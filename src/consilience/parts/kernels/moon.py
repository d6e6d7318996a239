"""MOON's contrast as one fused CUDA kernel: two cosines, their softplus, and the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EPS = 1e-8                  # least norm, as in F.cosine_similarity

if triton is not None:
    @triton.jit
    def _unit(x, place, mask, EPS: tl.constexpr):
        value = tl.load(x + place, mask=mask, other=0.0)
        long = tl.sqrt_rn(tl.sum(value * value, 1))
        return value / tl.maximum(long, EPS)[:, None], long

    @triton.jit
    def _contrast(z, received, previous, first, losses, grad, B, D, weight, scale, EPS: tl.constexpr, RR: tl.constexpr, DD: tl.constexpr):
        """A block of rows. With û, ĝ, p̂ the unit vectors: s = ⟨û, p̂ − ĝ⟩/τ; loss = w·softplus(s)/B; ∂û = w·σ(s)/(τB)·(p̂ − ĝ)."""
        b, d = tl.program_id(0) * RR + tl.arange(0, RR), tl.arange(0, DD)
        rows = b < B
        place, mask = b[:, None] * D + d[None, :], rows[:, None] & (d < D)[None, :]
        near, _n = _unit(received, place, mask, EPS)
        far, _f = _unit(previous, place, mask, EPS)
        away = far - near
        u, long = _unit(z, place, mask, EPS)
        s = tl.sum(u * away, 1) * scale
        e = tl.exp(-tl.abs(s))
        one = 1.0 + e                                # log(1 + e), exact where e is tiny, as log1p is
        soft = tl.maximum(s, 0.0) + tl.where(one == 1.0, e, tl.log(one) * (e / (one - 1.0 + (one == 1.0))))
        on = tl.where(tl.load(first) != 0, 0.0, weight / B)
        tl.store(losses + tl.program_id(0), on * tl.sum(tl.where(rows, soft, 0.0), 0))
        d_u = (on * scale * tl.where(s >= 0.0, 1.0, e) / one)[:, None] * away
        along = tl.where(long >= EPS, tl.sum(u * d_u, 1), 0.0)
        tl.store(grad + place, (d_u - u * along[:, None]) / tl.maximum(long, EPS)[:, None], mask=mask)


def usable(*features: Tensor) -> bool:
    return all(fused.ready(z, width=z.shape[1]) for z in features)


def contrast(z: Tensor, received: Tensor, previous: Tensor, first: Tensor, weight: float, tau: float) -> Tensor:
    """What `Moon.loss` returns."""
    b, d = z.shape
    losses, grad = z.new_empty(fused.blocks(b)), torch.empty_like(z.detach())
    fused.launch(_contrast, len(losses), z.detach(), received, previous, first, losses, grad, b, d, weight, 1 / tau, EPS,
                  fused.ROWS, fused.above(d), warps=8)
    return fused.known(losses, [z], [grad])
