"""The clients' local optimisers, on fixed memory and with the learning rate on the device, so that steps can be captured."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .. import tree
from ..channels_last import fills_memory
from ..tree import Flat, Tree
from .policy import Policy

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
PIECES, PIECE = 48, 2048        # tensors that PyTorch's kernels over three lists take in one launch; numbers that a block takes at a time


def init(policy: Policy, params: Flat) -> Tree:
    """State for the keys of one phase: nothing for plain SGD."""
    if policy.optimiser == "adam":
        device = next(iter(params.values())).device if params else None
        return {"m": tree.zeros(params), "v": tree.zeros(params), "t": torch.zeros((), device=device)}
    return {"m": tree.zeros(params)} if policy.momentum else {}


def descend(params: list[Tensor], grads: list[Tensor], lr: Tensor) -> None:
    """params -= lr * grads in place. On the CPU addcmul broadcasts lr without a copy of the gradients."""
    if not params:
        return
    if params[0].is_cuda:
        _fused_sgd(params, grads, [], lr)
    else:
        torch._foreach_addcmul_(params, grads, [lr] * len(params), value=-1.0)


def _fused_sgd(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], lr: Tensor, weight_decay: float = 0.0,
               momentum: float = 0.0) -> None:
    """One kernel for all tensors. It walks raw memory: a gradient that autograd returns transposed is laid out like its parameter first."""
    g = [gi if gi.stride() == pi.stride() else torch.empty_like(pi).copy_(gi) for gi, pi in zip(grads, params)]
    params, g, momenta = in_pieces(params, g, momenta)
    torch._fused_sgd_(params, g, momenta, weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=0.0, nesterov=False,
                      maximize=False, is_first_step=False)


def in_pieces(*lists: list[Tensor]) -> tuple[list[Tensor], ...]:
    """The same memory as flat pieces of equal length, as many as one launch takes; lists are alike in shapes and strides, or empty.

    PyTorch's kernel gives 65,536 numbers to a block of threads, so that a small model keeps a handful of blocks busy for long
    and the rest of the GPU idle.
    """
    sizes = [t.numel() for t in lists[0]]
    spare = PIECES - len(sizes)
    if spare <= 0 or not all(sizes) or not all(fills_memory(t) for ts in lists for t in ts):
        return lists
    length = max(-(-sum(sizes) // spare // PIECE) * PIECE, PIECE)
    return tuple([piece for t in ts for piece in t.detach().as_strided((t.numel(),), (1,)).split(length)] for ts in lists)


def for_own_steps(policy: Policy) -> Policy:
    """What the parts' own steps are made with: SGD with the run's learning rate and momentum, without weight decay."""
    return replace(policy, optimiser="sgd", weight_decay=0.0)


def is_plain(policy: Policy) -> bool:
    """Whether a step is `descend` and nothing else."""
    return policy.optimiser == "sgd" and not policy.momentum and not policy.weight_decay


@torch.no_grad()
def update(policy: Policy, params: Flat, grads: Flat, state: Tree, lr: Tensor) -> None:
    """One step in place, for the keys of `grads`."""
    keys = [*grads]
    if not keys:
        return
    p, g = [params[k] for k in keys], [grads[k] for k in keys]
    if p[0].is_cuda and policy.optimiser == "sgd":
        return _fused_sgd(p, g, [state["m"][k] for k in keys] if policy.momentum else [], lr, policy.weight_decay, policy.momentum)
    if policy.weight_decay:
        g = list(torch._foreach_add(g, p, alpha=policy.weight_decay))
    if policy.optimiser == "adam":
        g = _adam_direction(state, keys, g)
    elif policy.momentum:
        m = [state["m"][k] for k in keys]
        torch._foreach_mul_(m, policy.momentum)
        torch._foreach_add_(m, g)
        g = m
    descend(p, g, lr)


def _adam_direction(state: Tree, keys: list[str], g: list[Tensor]) -> list[Tensor]:
    """m̂ / (√v̂ + ε), as torch.optim.Adam computes it (weight decay is added to the gradient, not decoupled)."""
    (b1, b2), m, v, t = ADAM_BETAS, [state["m"][k] for k in keys], [state["v"][k] for k in keys], state["t"]
    t.add_(1)
    torch._foreach_mul_(m, b1)
    torch._foreach_add_(m, g, alpha=1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, value=1 - b2)
    # 1 − β^t on the device: t is a tensor because a captured number would stay what it was
    first, second = 1 - torch.exp(t * math.log(b1)), 1 - torch.exp(t * math.log(b2))
    root = list(torch._foreach_sqrt(v))
    torch._foreach_div_(root, second.sqrt())
    torch._foreach_add_(root, ADAM_EPS)
    out = list(torch._foreach_div(m, root))
    torch._foreach_div_(out, first)
    return out
