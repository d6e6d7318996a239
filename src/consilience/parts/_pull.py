"""A pull (s/2)‖w − target‖² of parameters: its value for the loss, its gradient s(w − target) for the `grad` hook.

As a term of the loss alone it costs a GPU four small kernels a tensor: two for the sum of squares, and one for adding its gradient to
the task's. Here all tensors are laid end to end, and eight kernels serve any number of them. That takes the gradient past autograd, so
it is done only where nobody could see the difference: see `StepView.first_on_gradient`. Elsewhere the term goes through autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..core.optimiser import in_pieces
from ..core.step import StepView
from ..tree import Flat

DEVICE = "cuda"             # tests put the CPU here


def loss(v: StepView, keys: Iterable[str], target: Flat, strength: float) -> Any:
    """The term of the loss."""
    near = tree.pick(v.params, keys)
    if not _apart(v, near):
        return 0.5 * strength * tree.sq_dist(near, target)
    return torch.linalg.vector_norm(_difference(v, near, target)).square() * (0.5 * strength)


def grad(v: StepView, g: Flat, keys: Iterable[str], target: Flat, strength: float) -> Flat:
    """g with the pull, where `loss` left it to this hook."""
    near = tree.pick(v.params, keys)
    if not _apart(v, near):
        return g
    whole = torch.cat([_memory(g[k], p) for k, p in near.items()]).add_(_difference(v, near, target), alpha=strength)
    parts = whole.split([p.numel() for p in near.values()])
    return {**g, **{k: part.as_strided(p.shape, p.stride()) for (k, p), part in zip(near.items(), parts)}}


def _apart(v: StepView, near: Flat) -> bool:
    """Whether the gradient is left to the `grad` hook: on a GPU, for tensors whose memory can be laid end to end."""
    return bool(near) and v.first_on_gradient and all(
        p.device.type == DEVICE and p.dtype == torch.float32 and p.numel() > 0
        and (p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))) for p in near.values())


def _difference(v: StepView, near: Flat, target: Flat) -> Tensor:
    """w − target, all tensors end to end; computed once a step."""
    def compute() -> Tensor:
        with torch.no_grad():
            whole = torch.cat([_memory(p, p) for p in near.values()])
            own = list(whole.split([p.numel() for p in near.values()]))
            torch._foreach_sub_(*in_pieces(own, [_memory(target[k], p) for k, p in near.items()]))
        return whole
    difference: Tensor = v.once("pull", compute)
    return difference


def _memory(t: Tensor, like: Tensor) -> Tensor:
    """The numbers of t in the order in which those of `like` lie."""
    same = t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)
    return same.detach().as_strided((t.numel(),), (1,))
