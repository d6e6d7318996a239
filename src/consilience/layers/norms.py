"""Normalisation computed together with its neighbours: on a GPU in one or two kernels each way, elsewhere by the layers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import batch_norm, group_norm, group_norm_twice
from ..kernels.derivatives import transformed, twice
from .listeners import heard

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_NEW = (nn.Conv2d, nn.GroupNorm, *_BATCH_NORMS)       # what they give is a tensor that nobody else holds


def norm_relu(norm: nn.Module, x: Tensor, add: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + add)."""
    if type(norm) in _BATCH_NORMS and batch_norm.usable(norm, x, add) and not heard(norm) and not transformed():
        return batch_norm.norm_relu(norm, x, add, relu)
    y = norm(x)
    y = y if add is None else y + add
    return F.relu(y) if relu else y


def relu_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(relu(x))."""
    if type(norm) is nn.GroupNorm and group_norm.usable(norm, x) and not heard(norm):
        if twice():
            return group_norm_twice.relu_norm(norm, x)
        if not transformed():
            return group_norm.relu_norm(norm, x)
    return norm(F.relu(x))


def may_begin(kinds: Sequence[type]) -> bool:
    """Whether `together` may compute layers of these types together, beginning with the first."""
    return kinds[0] in _BATCH_NORMS or (kinds[0] is nn.ReLU and kinds[1:2] == (nn.GroupNorm,))


def together(x: Tensor, layers: Sequence[Any], at: int) -> tuple[int, Tensor] | None:
    """How many of a chain's layers from `at` on were computed together, and what came out; None where they go one by one."""
    first, second = layers[at], layers[at + 1] if at + 1 < len(layers) else None
    if type(first) in _BATCH_NORMS and not heard(first):
        if type(second) is nn.ReLU and not heard(second):
            return 2, norm_relu(first, x)
        return 1, norm_relu(first, x, relu=False)
    if type(first) is nn.ReLU and type(second) is nn.GroupNorm and not heard(first, second) and not (first.inplace and _shared(layers, at)):
        return 2, relu_norm(second, x)
    return None


def _shared(layers: Sequence[Any], at: int) -> bool:
    """Whether somebody else may hold what enters a layer. A ReLU in place must then write to it: a shortcut around the chain sees that."""
    return at == 0 or type(layers[at - 1]) not in _NEW or heard(layers[at - 1])
