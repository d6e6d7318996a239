"""LfD's two cross-entropies with margin as one fused CUDA kernel forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.derivatives import first_order
from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 1024

if triton is not None:
    @triton.jit
    def _exp(x):
        """Row by row e^(x − max), its sum, and log Σ e^x."""
        top = tl.max(x, 1)
        e = tl.exp(x - top[:, None])
        whole = tl.sum(e, 1)
        return e / whole[:, None], tl.log(whole) + top

    @triton.jit
    def _both(f, target, received, previous, first, main, term, main_grad, term_grad, B, C, margin, weight, back_scale, HARD: tl.constexpr,
              IN_REG: tl.constexpr, UNIFORM: tl.constexpr, RR: tl.constexpr, CC: tl.constexpr):
        """A block of rows. With y the label, l = f − margin·y and ŷ = softmax((received − previous)·back_scale):

        main = Σ y·(lse l − l)/B, ∂f = (softmax l·Σy − y)/B; term = w·Σ ŷ·(lse l − l)/B, ∂f = w·(softmax l − ŷ)/B.
        """
        b, c = tl.program_id(0) * RR + tl.arange(0, RR), tl.arange(0, CC)
        rows, classes = b < B, (c < C)[None, :]
        place, mask = b[:, None] * C + c[None, :], rows[:, None] & classes
        x = tl.load(f + place, mask=mask, other=0.0)
        if HARD:
            y = tl.where(c[None, :] == tl.load(target + b, mask=rows, other=-1)[:, None], 1.0, 0.0)
        else:
            y = tl.load(target + place, mask=mask, other=0.0)
        low = tl.where(classes, x - margin * y, float("-inf"))
        p, lse = _exp(low)
        apart = tl.where(mask, lse[:, None] - low, 0.0)
        tl.store(main + tl.program_id(0), tl.sum(tl.sum(y * apart, 1), 0) / B)
        tl.store(main_grad + place, (p * tl.sum(y, 1)[:, None] - y) / B, mask=mask)
        back = tl.load(received + place, mask=mask, other=0.0) - tl.load(previous + place, mask=mask, other=0.0)
        label, _lse = _exp(tl.where(classes, back * back_scale, float("-inf")))
        never = tl.load(first) != 0
        on = weight
        if UNIFORM:
            label = tl.where(never, tl.where(classes, 1.0 / C, 0.0), label)
        else:
            on = tl.where(never, 0.0, weight)
        if not IN_REG:
            p, lse = _exp(tl.where(classes, x, float("-inf")))
            apart = tl.where(mask, lse[:, None] - x, 0.0)
        tl.store(term + tl.program_id(0), on * tl.sum(tl.sum(label * apart, 1), 0) / B)
        tl.store(term_grad + place, (p - label) * (on / B), mask=mask)

    @triton.jit
    def _sum(one, other, of_one, of_other, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(one + i, mask=i < n, other=0.0) * tl.load(of_one) + tl.load(other + i, mask=i < n, other=0.0) * tl.load(of_other)
        tl.store(out + i, value, mask=i < n)


def usable(f: Tensor) -> bool:
    return fused.ready(f, classes=f.shape[1])


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, target: Tensor, received: Tensor, previous: Tensor, first: Tensor, margin: float, weight: float,
                back_scale: float, in_reg: bool, uniform: bool) -> Any:
        (b, c), programs = f.shape, fused.blocks(len(f))
        main, term, grads = f.new_empty(programs), f.new_empty(programs), [torch.empty_like(f), torch.empty_like(f)]
        given = f, target.contiguous(), received.contiguous(), previous.contiguous(), first
        fused.launch(_both, programs, *given, main, term, *grads, b, c, margin, weight, back_scale, not target.is_floating_point(),
                      in_reg, uniform, fused.ROWS, fused.above(c))
        ctx.save_for_backward(*grads)
        return tuple(t.sum() if programs > 1 else t.view(()) for t in (main, term))

    @staticmethod
    @first_order
    def backward(ctx: Any, *above: Tensor) -> Any:
        one, other = ctx.saved_tensors
        out = torch.empty_like(one)
        fused.launch(_sum, (one.numel() + BLOCK - 1) // BLOCK, one, other, *above, out, one.numel(), BLOCK)
        return out, *[None] * 9


def both(f: Tensor, target: Tensor, received: Tensor, previous: Tensor, first: Tensor, margin: float, weight: float, back_scale: float,
         in_reg: bool, uniform: bool) -> tuple[Tensor, Tensor]:
    """What `Drift.main_loss` and `Drift.loss` return. margin: over τ; first: whether the client has no previous model."""
    main, term = _Both.apply(f, target, received, previous, first, margin, weight, back_scale, in_reg, uniform)
    return main, term
