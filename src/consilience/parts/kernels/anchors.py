"""FedFM's guiding as one fused CUDA kernel: normalise, compare with the anchors, cross-entropy, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    @triton.jit
    def _guide(h, anchor, absent, weight, target, losses, grad, B, C, D, HARD: tl.constexpr, RR: tl.constexpr, CC: tl.constexpr,
               DD: tl.constexpr):
        """One block of rows. With u = h/‖h‖, l = u·Aᵀ + absent, p = softmax(l) and the weighted label t = w·y:

        loss = Σ t·(lse − l)/B; ∂l = (p·Σt − t)/B; ∂u = ∂l·A; ∂h = (∂u − u⟨u, ∂u⟩)/‖h‖, without the bracket's second half where
        ‖h‖ stood below 1e-12. A is walked class by class: its rows come from the cache, and no sum depends on who comes first.
        """
        b, d, c = tl.program_id(0) * RR + tl.arange(0, RR), tl.arange(0, DD), tl.arange(0, CC)
        rows, wide, classes = b < B, d < D, c < C
        place = b[:, None] * D + d[None, :]
        mask = rows[:, None] & wide[None, :]
        value = tl.load(h + place, mask=mask, other=0.0)
        long = tl.sqrt_rn(tl.sum(value * value, 1))
        norm = tl.maximum(long, 1e-12)
        u = value / norm[:, None]
        near = tl.zeros((RR, CC), tl.float32)
        for k in range(C):
            a = tl.load(anchor + k * D + d, mask=wide, other=0.0)
            near += tl.where(c[None, :] == k, tl.sum(u * a[None, :], 1)[:, None], 0.0)
        near += tl.load(absent + c, mask=classes, other=0.0)[None, :]
        near = tl.where(classes[None, :], near, float("-inf"))
        w = tl.load(weight + c, mask=classes, other=0.0)
        if HARD:
            y = tl.load(target + b, mask=rows, other=-1)
            t = tl.where(c[None, :] == y[:, None], w[None, :], 0.0)
        else:
            label = tl.load(target + b[:, None] * C + c[None, :], mask=rows[:, None] & classes[None, :], other=0.0)
            t = label * w[None, :]
        top = tl.max(near, 1)
        e = tl.exp(near - top[:, None])
        whole = tl.sum(e, 1)
        lse = tl.log(whole) + top
        loss = tl.where(rows, tl.sum(t * tl.where(classes[None, :], lse[:, None] - near, 0.0), 1), 0.0)
        tl.store(losses + tl.program_id(0), tl.sum(loss, 0) / B)
        d_near = (e / whole[:, None] * tl.sum(t, 1)[:, None] - t) / B
        d_u = tl.zeros((RR, DD), tl.float32)
        for k in range(C):
            a = tl.load(anchor + k * D + d, mask=wide, other=0.0)
            d_u += tl.sum(tl.where(c[None, :] == k, d_near, 0.0), 1)[:, None] * a[None, :]
        back = tl.where(long >= 1e-12, tl.sum(u * d_u, 1), 0.0)
        tl.store(grad + place, (d_u - u * back[:, None]) / norm[:, None], mask=mask)


def usable(h: Tensor, anchor: Tensor) -> bool:
    return fused.ready(h, anchor, width=h.shape[1], classes=len(anchor))


def guide(h: Tensor, anchor: Tensor, absent: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What `Anchors.loss` returns with mode=guide. anchor: normalised and over τ."""
    (b, d), c, plain = h.shape, len(anchor), h.detach()
    losses, grad = h.new_empty(fused.blocks(b)), torch.empty_like(plain)
    fused.launch(_guide, fused.blocks(b), plain, anchor, absent, weight, target.contiguous(), losses, grad, b, c, d,
                  not target.is_floating_point(), fused.ROWS, fused.above(c), fused.above(d), warps=8)
    return fused.known(losses, [h], [grad])
