"""Convolutions on a GPU where gradients are differentiated.

The way back ∂x = g ∗ W, differentiated along u, has ∂W = wgrad(u, g), the gradient that every convolution has for its weights. PyTorch
computes it as a convolution of u by a kernel as large as g's maps, 28 × 28 say, with 3 × 3 results for each pair of channels. cuDNN has no
good way for these: few results, each a sum over all samples and positions. Here it is asked for the gradient of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .bfloat16 import _Ready
from .folding import fold_of

_back = torch.ops.aten.convolution_backward


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return torch.conv2d(x, weight, None, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_WayBack.apply(grads[0], *ctx.saved_tensors, ctx.how, _goes_on_to(ctx)), None


class _WayBack(torch.autograd.Function):
    """From the gradient of a convolution to those of its maps and its weights, as far as they are wanted."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, how: tuple[Any, ...], wanted: tuple[bool, bool]) -> Any:
        ctx.save_for_backward(g, x, weight)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return _gradients(g, x, weight, how, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """In PyTorch's operations, which have derivatives of their own. Convolutions are linear in maps and in weights, so that each of the
        two that arrive takes the place of its original."""
        (g, x, weight), (u, v), how = ctx.saved_tensors, grads, ctx.how
        dg = dx = dweight = None
        if u is not None:
            dg, dweight = torch.conv2d(u, weight, None, *how), _gradients(g, u, weight, how, (False, True))[1]
        if v is not None:
            more, dx = torch.conv2d(x, v, None, *how), _gradients(g, x, v, how, (True, False))[0]
            dg = more if dg is None else dg + more
        return dg, dx, dweight, None, None


def _gradients(g: Tensor, x: Tensor, weight: Tensor, how: tuple[Any, ...], wanted: tuple[bool, bool]) -> Any:
    stride, padding, dilation, groups = how
    return _back(g, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [*wanted, False])[:2]


def _goes_on_to(node: Any) -> tuple[bool, bool]:
    """Whether the way back that is under way leads to the maps, and to the weights. `needs_input_grad` says only whether some way does,
    and the slope of an input has no use for gradients of weights."""
    maps, weights = (then is not None and torch._C._will_engine_execute_node(then) for then, _ in node.next_functions[:2])
    return maps, weights


def _within(t: Tensor) -> Tensor:
    """With a node of its own: of leaves the engine does not tell whether it goes on to them."""
    return t.view_as(t) if t.is_leaf and t.requires_grad else t


def usable(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether this is a convolution of maps on a GPU with zeros around, and not one that may be folded."""
    return (x.is_cuda and x.dim() == 4 and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
            and not torch.jit.is_tracing() and fold_of(conv, *x.shape[-2:]) is None)


def without_bias(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the layer gives before its bias is added, and that bias in the type of the maps, as `bfloat16.without_bias` has it."""
    ready, part = conv.take_ready(x) if isinstance(conv, _Ready) else ({}, None)
    weight = ready["weight"] if "weight" in ready else conv.weight if part is None else part.of(conv.weight)
    if torch.is_autocast_enabled(x.device.type):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(narrow), weight.to(narrow)
    padding = conv.padding if part is None else part.padding
    maps = _Convolution.apply(_within(x), _within(weight), (conv.stride, padding, conv.dilation, conv.groups))
    bias = ready.get("bias", conv.bias)
    return maps, None if bias is None else bias.to(maps.dtype)


def with_bias(maps: Tensor, bias: Tensor | None) -> Tensor:
    return maps if bias is None else maps + bias[:, None, None]
