"""DBE's running mean, the distance to the agreed mean and its gradient as one fused CUDA kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from . import fused

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS, WIDEST = 16, 1024               # rows read at a time; columns, for one program serves all of them

if triton is not None:
    @triton.jit
    def _regularise(z, mean, goal, steps, new_mean, new_steps, losses, grad, B, D, momentum, weight, RR: tl.constexpr, DD: tl.constexpr):
        """new = (1 − μ)·mean + μ·Σ_b z/B; loss = w·Σ(new − goal)²/D; ∂z = w·2(new − goal)/D·μ/B, the same for every row."""
        d = tl.arange(0, DD)
        here = d < D
        seen = tl.zeros((DD,), tl.float32)
        for start in range(0, B, RR):
            b = start + tl.arange(0, RR)
            seen += tl.sum(tl.load(z + b[:, None] * D + d[None, :], mask=(b < B)[:, None] & here[None, :], other=0.0), 0)
        new = (1.0 - momentum) * tl.load(mean + d, mask=here, other=0.0) + momentum * (seen / B)
        apart = tl.where(here, new - tl.load(goal + d, mask=here, other=0.0), 0.0)
        tl.store(new_mean + d, new, mask=here)
        tl.store(grad + d, apart * (2.0 * weight * momentum / (D * B)), mask=here)
        tl.store(losses, weight * (tl.sum(apart * apart, 0) / D))
        tl.store(new_steps, tl.load(steps) + 1.0)


def usable(z: Tensor, mean: Tensor) -> bool:
    return fused.ready(z, mean) and mean.numel() <= WIDEST


def regularise(z: Tensor, mean: Tensor, goal: Tensor, steps: Tensor, momentum: float, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """The running mean and the number of steps after this one, and w·MSE(mean, goal) with its gradient for z."""
    new, after, losses, grad = torch.empty_like(mean), torch.empty_like(steps), z.new_empty(1), torch.empty_like(mean)
    fused.launch(_regularise, 1, z.detach(), mean, goal, steps, new, after, losses, grad, len(z), mean.numel(), momentum, weight, ROWS,
                  fused.above(mean.numel()), warps=8)
    return new, after, fused.known(losses, [z], [grad])
