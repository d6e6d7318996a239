"""Layers that are computed together: convolution, ReLU and pooling as one, a linear layer with its ReLU as one.

Nothing changes in what a model is: names, parameters and hooks stay, and a layer that somebody listens to runs by itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from . import _linear_cuda, _stage_cpu, _stage_cuda, norms


class Chain(nn.Sequential):
    """A Sequential that looks for layers to compute together."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self._modules.values())
        at = 0
        while at < len(layers):
            taken, x = _together(x, layers, at, self)
            at += taken
        return x

    def next_layer(self) -> nn.Module | None:
        """The layer that takes what this chain gives, where another chain follows and nobody listens between the two."""
        following = self.__dict__.get("following")
        if following is None or self._forward_hooks or following._forward_pre_hooks or not len(following):
            return None
        layer: nn.Module = following[0]
        return layer


class Linear(nn.Linear):
    """PyTorch's layer, with one kernel each way where the batch is small and on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return _linear_cuda.linear(x, self.weight, self.bias, False) if _linear_cuda.usable(x, self) else super().forward(x)


def _together(x: Tensor, layers: list[Any], at: int, chain: Chain) -> tuple[int, Tensor]:
    """How many layers were computed, and what came out."""
    first = layers[at]
    if isinstance(first, Linear) and _follows(layers, at, nn.ReLU) and _linear_cuda.usable(x, first):
        return 2, _linear_cuda.linear(x, first.weight, first.bias, True)
    if isinstance(first, nn.Conv2d) and _follows(layers, at, nn.ReLU, nn.MaxPool2d):
        if _stage_cpu.usable(x, first, layers[at + 2]):
            return 3, _stage_cpu.conv_relu_pool(x, first, layers[at + 2], layers[at + 3] if at + 3 < len(layers) else chain.next_layer())
        if type(first) is nn.Conv2d and _plain(first, layers[at + 2]) and _stage_cuda.usable(x, first):
            return 3, _stage_cuda.conv_relu_pool(x, first.weight, first.bias, int(first.padding[0]))
    return norms.together(x, layers, at) or (1, first(x))


def _follows(layers: list[Any], at: int, *kinds: type) -> bool:
    """Whether such layers come next, and nobody listens to any of them."""
    chosen = layers[at: at + 1 + len(kinds)]
    return (len(chosen) == 1 + len(kinds) and all(isinstance(layer, kind) for layer, kind in zip(chosen[1:], kinds))
            and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in chosen))


def _plain(conv: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    """Whether these are a square convolution of stride 1 with zeros around, and a pooling of 2×2 windows side by side."""
    plain = lambda n: n in (1, (1, 1))
    return (not torch.jit.is_tracing() and conv.kernel_size[0] == conv.kernel_size[1] and plain(conv.stride) and plain(conv.dilation)
            and conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
            and conv.padding[0] == conv.padding[1]
            and pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2)) and pool.padding in (0, (0, 0)) and plain(pool.dilation)
            and not pool.ceil_mode and not pool.return_indices)


def compute_together(module: nn.Module) -> None:
    """Let a module's chains and linear layers use what is above."""
    for layer in module.modules():
        if type(layer) is nn.Sequential:
            layer.__class__ = Chain
        elif type(layer) is nn.Linear:
            layer.__class__ = Linear
    for holder in module.modules():
        in_turn = holder._modules if isinstance(holder, Chain) else getattr(holder, "_order", ())      # names of what it runs one by one
        for name, following in itertools.pairwise(in_turn):
            first, second = holder._modules[name], holder._modules[following]
            if isinstance(first, Chain) and isinstance(second, Chain):
                first.__dict__["following"] = second                  # known, not owned: it must not show among the chain's layers
