"""What parts declare to be added to every gradient, and how a step adds it where no kernel makes that step as a whole.

A pull as a term of the loss alone costs a GPU four small kernels a tensor: two for the sum of squares, and one for adding its gradient to
the task's. Here all tensors are laid end to end, and eight kernels serve any number of them. That takes the gradient past autograd, so it
is done only where nobody could see the difference (`Step.past_autograd`). Elsewhere the term goes through autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..channels_last import fills_memory
from ..errors import ConfigError
from ..tree import Flat
from .optimiser import in_pieces

if TYPE_CHECKING:
    from .part import Part

DEVICE = "cuda"             # tests put the CPU here


class Correction(NamedTuple):
    """g + add + strength·(w − target) in place of g, the same in all steps of a client's round.

    The pull to the target is the gradient of (strength/2)‖w − target‖², which the loss then holds; `add` shows in no loss. Trees are by
    parameter; what the phase does not train is left as it is.
    """

    add: Flat = {}
    strength: float = 0.0
    target: Flat = {}


def declared(part: Part, given: Any, params: Flat, keys: Iterable[str]) -> Correction:
    """What a part declares for a model with these parameters, as far as these keys go."""
    if not isinstance(given, Correction):
        raise ConfigError(f"The hook 'correction' of part {part.name!r} must return a Correction(add, strength, target). "
                          f"Got {type(given).__name__} instead.{' Is a return missing?' if given is None else ''}")
    if not isinstance(given.strength, (int, float)):             # a kernel takes it when it is launched, not when it runs
        raise ConfigError(f"The strength in the correction of part {part.name!r} must be a number. Got {type(given.strength).__name__} "
                          "instead. What is known on the device alone belongs into the hook 'grad'.")
    for what, flat in (("add", given.add), ("target", given.target)):
        _check_tree(f"The {what} in the correction of part {part.name!r}", flat, params)
    keys = tuple(keys)
    add, target = (tree.pick(flat, [k for k in keys if k in flat]) for flat in (given.add, given.target))
    return Correction(add, float(given.strength), target)


def _check_tree(what: str, flat: Any, params: Flat) -> None:
    """Names that no parameter has would change nothing, without a word, and other shapes would be spread over the parameter's."""
    if not isinstance(flat, dict):
        raise ConfigError(f"{what} must be a tree by parameter, as v.received['params'] is. Got {type(flat).__name__} instead.")
    for key, t in flat.items():
        if key not in params:
            raise ConfigError(f"{what} has {key!r}, which is no parameter of the model. It must be a tree by parameter, as "
                              "v.received['params'] is.")
        if not isinstance(t, Tensor) or t.shape != params[key].shape:
            got = f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ConfigError(f"{what} must have a tensor of shape {tuple(params[key].shape)} for {key!r}. Got {got} instead.")


def term(params: Flat, own: Correction) -> Any:
    """The pull's term of the loss, for autograd."""
    return 0.5 * own.strength * tree.sq_dist(tree.pick(params, own.target), own.target)


def on_gpu(params: Flat, own: Correction) -> bool:
    """Whether the pull is better off past autograd: on a GPU, for tensors whose memory can be laid end to end."""
    near = [params[k] for k in own.target]
    return bool(near) and all(p.device.type == DEVICE and p.dtype == torch.float32 and p.numel() > 0 and fills_memory(p) for p in near)


def pulled(g: Flat, params: Flat, own: Correction) -> tuple[Flat, Tensor]:
    """g with the pull, and the term of the loss, past autograd."""
    near = tree.pick(params, own.target)
    sizes = [p.numel() for p in near.values()]
    away = torch.cat([_memory(p, p) for p in near.values()])
    torch._foreach_sub_(*in_pieces(list(away.split(sizes)), [_memory(own.target[k], p) for k, p in near.items()]))
    whole = torch.cat([_memory(g[k], p) for k, p in near.items()]).add_(away, alpha=own.strength)
    parts = {k: part.as_strided(p.shape, p.stride()) for (k, p), part in zip(near.items(), whole.split(sizes))}
    return {**g, **parts}, torch.linalg.vector_norm(away).square() * (0.5 * own.strength)


def _memory(t: Tensor, like: Tensor) -> Tensor:
    """The numbers of t in the order in which those of `like` lie."""
    same = t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)
    return same.detach().as_strided((t.numel(),), (1,))
