"""Layers that are computed together: convolution, ReLU and pooling as one, or what follows the convolution; a linear layer with its ReLU.

Nothing changes in what a model is: names, parameters and hooks stay. Only PyTorch's own layers are taken, by their exact type, and a
layer that somebody listens to runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..channels_last import is_turned
from ..kernels import after_conv, group_norm, group_norm_twice, linear, stage
from ..kernels.derivatives import transformed, twice
from . import conv_twice, norms, stage_cpu
from .bfloat16 import READY, without_bias
from .listeners import heard
from .pooling import AdaptiveAvgPool2d, MaxPool2d, by_twos


class Chain(nn.Sequential):
    """A Sequential that looks for layers to compute together."""

    def forward(self, input: Tensor) -> Tensor:
        return in_turn(tuple(self._modules.values()), input)


class Linear(nn.Linear):
    """PyTorch's layer, with one kernel each way where the batch is small and on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        if linear.usable(input, self) and not transformed():
            return linear.linear(input, self.weight, self.bias, False)
        return super().forward(input)


_CONVOLUTIONS, _POOLS = (nn.Conv2d, READY[nn.Conv2d]), (nn.MaxPool2d, MaxPool2d)
_AVERAGES = (nn.AdaptiveAvgPool2d, AdaptiveAvgPool2d)
_EITHER_LAYOUT = frozenset((*_CONVOLUTIONS, *_POOLS, *_AVERAGES, nn.ReLU, nn.Flatten, Chain))       # none the worse for turned maps


def in_turn(layers: Sequence[Any], x: Tensor) -> Tensor:
    """What comes out of layers that run one after another. Maps have the layout that PyTorch's layers give them."""
    x, turned = _run(layers, x, False)
    return x.contiguous() if turned else x


def _run(layers: Sequence[Any], x: Tensor, turned: bool) -> tuple[Tensor, bool]:
    """The same, but `turned` says whether maps come in, and go out, with channels together where PyTorch would not have put them so."""
    again = twice()
    starts = _starts(tuple(map(type, layers)), again)
    one_by_one, at = transformed() and not again, 0
    while at < len(layers):
        layer, start = layers[at], starts[at]
        if turned and (type(layer) not in _EITHER_LAYOUT or heard(layer)):
            x, turned = x.contiguous(), False
        done = None if start is None or one_by_one else start(x, turned, layers, at)
        taken, x, turned = done or (1, layer(x), turned)
        at += taken
    return x, turned


_Start = Callable[[Any, bool, Sequence[Any], int], tuple[int, Tensor, bool] | None]      # how many layers were computed, and what came out


@lru_cache(maxsize=512)
def _starts(kinds: tuple[type, ...], again: bool) -> tuple[_Start | None, ...]:
    """For each place in a row of layers what may begin there, as far as types tell. Hooks and tensors are looked at in each pass.
    `again`: where gradients are to be differentiated.
    """
    return tuple((_start_twice if again else _start)(kinds[at:]) for at in range(len(kinds)))


def _start(kinds: tuple[type, ...]) -> _Start | None:
    if kinds[0] is Chain:
        return _inner
    if kinds[:2] == (Linear, nn.ReLU):
        return _linear_relu
    if kinds[0] in _CONVOLUTIONS and kinds[1:3] == (nn.ReLU, nn.GroupNorm):
        return _conv_relu_norm
    if kinds[0] in _CONVOLUTIONS and kinds[1:2] == (nn.ReLU,):
        return _conv_relu_pool if kinds[2:3] and kinds[2] in _POOLS else _conv_relu
    return _norm if norms.may_begin(kinds) else None


def _start_twice(kinds: tuple[type, ...]) -> _Start | None:
    """Of these what has second derivatives."""
    if kinds[0] in _CONVOLUTIONS:
        return _conv_relu_norm_twice if kinds[1:3] == (nn.ReLU, nn.GroupNorm) else _conv_alone_twice
    return _norm if kinds[:2] == (nn.ReLU, nn.GroupNorm) else None


def _inner(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    """A chain within a chain, which may hand on its maps as they are."""
    return None if heard(layers[at]) else (1, *_run(tuple(layers[at]._modules.values()), x, turned))


def _linear_relu(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    layer = layers[at]
    if not linear.usable(x, layer) or heard(layer, layers[at + 1]):
        return None
    return 2, linear.linear(x, layer.weight, layer.bias, True), turned


def _conv_relu_pool(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    conv, relu, pool = layers[at: at + 3]
    if heard(conv, relu, pool):
        return _conv_relu(x, turned, layers, at)
    if stage_cpu.usable(x, conv, pool):
        own = turned or not (is_turned(x) or is_turned(conv.weight))
        return 3, stage_cpu.conv_relu_pool(x, conv, pool), own
    if not by_twos(pool):
        return _conv_relu(x, turned, layers, at)
    if type(conv) is nn.Conv2d and _plain(conv) and stage.usable(x, conv):
        return 3, stage.conv_relu_pool(x, conv.weight, conv.bias, int(conv.padding[0])), turned
    if conv.bias is not None and after_conv.usable(x):
        return 3, after_conv.bias_relu_pool(*without_bias(conv, x), True), turned
    return None


def _conv_relu(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    conv, relu = layers[at: at + 2]
    if heard(conv, relu) or conv.bias is None or not after_conv.usable(x):
        return None
    return 2, after_conv.bias_relu_pool(*without_bias(conv, x), False), turned


def _conv_relu_norm(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    conv, relu, norm = layers[at: at + 3]
    if heard(conv, relu) or conv.bias is None or not after_conv.usable(x):
        return None
    maps, bias = without_bias(conv, x)
    if group_norm.usable(norm, maps) and not heard(norm):
        return 3, group_norm.relu_norm(norm, maps, bias), turned
    return 2, after_conv.bias_relu_pool(maps, bias, False), turned


def _conv_relu_norm_twice(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    conv, relu, norm = layers[at: at + 3]
    if heard(conv) or not conv_twice.usable(conv, x):
        return None
    maps, bias = conv_twice.without_bias(conv, x)
    if group_norm.usable(norm, maps) and not heard(relu, norm):
        return 3, group_norm_twice.relu_norm(norm, maps, bias), turned
    return 1, conv_twice.with_bias(maps, bias), turned


def _conv_alone_twice(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    conv = layers[at]
    if heard(conv) or not conv_twice.usable(conv, x):
        return None
    return 1, conv_twice.with_bias(*conv_twice.without_bias(conv, x)), turned


def _norm(x: Any, turned: bool, layers: Sequence[Any], at: int) -> tuple[int, Tensor, bool] | None:
    done = norms.together(x, layers, at)
    return None if done is None else (*done, turned)


def _plain(conv: nn.Conv2d) -> bool:
    """Whether this is a square convolution of stride 1 with zeros around."""
    return (not torch.jit.is_tracing() and conv.kernel_size[0] == conv.kernel_size[1] and _one(conv.stride) and _one(conv.dilation)
            and conv.groups == 1 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
            and conv.padding[0] == conv.padding[1])


def _one(n: Any) -> bool:
    return n in (1, (1, 1))


def compute_together(module: nn.Module) -> None:
    """Let a module's chains and linear layers use what is above."""
    for layer in module.modules():
        if type(layer) is nn.Sequential:
            layer.__class__ = Chain
        elif type(layer) is nn.Linear:
            layer.__class__ = Linear
