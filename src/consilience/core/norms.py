"""Normalisation computed together with its neighbours: on a GPU in one or two kernels each way, elsewhere by the layers themselves."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from . import _groups_cuda, _norms_cuda

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def norm_relu(norm: nn.Module, x: Tensor, add: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + add)."""
    if type(norm) in _BATCH_NORMS and not _heard(norm) and _norms_cuda.usable(norm, x, add):
        return _norms_cuda.norm_relu(norm, x, add, relu)
    y = norm(x)
    y = y if add is None else y + add
    return F.relu(y) if relu else y


def relu_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(relu(x))."""
    if type(norm) is nn.GroupNorm and not _heard(norm) and _groups_cuda.usable(norm, x):
        return _groups_cuda.relu_norm(norm, x)
    return norm(F.relu(x))


def _heard(*layers: nn.Module) -> bool:
    """Whether somebody listens to a layer, which must then run by itself."""
    return any(h._forward_hooks or h._forward_pre_hooks or h._backward_hooks or h._backward_pre_hooks for h in layers)


def together(x: Tensor, layers: list[Any], at: int) -> tuple[int, Tensor] | None:
    """How many of a chain's layers from `at` on were computed together, and what came out; None where they go one by one."""
    first, second = layers[at], layers[at + 1] if at + 1 < len(layers) else None
    if type(first) in _BATCH_NORMS and not _heard(first):
        if type(second) is nn.ReLU and not _heard(second):
            return 2, norm_relu(first, x)
        return 1, norm_relu(first, x, relu=False)
    if type(first) is nn.ReLU and type(second) is nn.GroupNorm and not _heard(first, second):
        return 2, relu_norm(second, x)
    return None


class NormChain(nn.Sequential):
    """A Sequential whose normalisation layers are computed together with the ReLU beside them."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self._modules.values())
        at = 0
        while at < len(layers):
            taken, x = together(x, layers, at) or (1, layers[at](x))
            at += taken
        return x
