"""Weights cast to bfloat16 all at once. The same numbers as autocast's, bit for bit, in two launches instead of two per weight.

Autocast casts a layer's weight when the layer runs, and its gradient back when that arrives. Here a pass begins by casting the weights
of all layers it will run, and one node casts all their gradients back. A layer sees the cast weight during its own call only: who else
reads it (a loss on the head's weights, a module of the user) reads the float32 parameter, as under autocast.

One exception: on a CPU small linear layers, heads above all, stay in float32. There bfloat16 costs more to set up than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SMALL = 2**16        # weights of a linear layer; up to here float32 is faster on CPUs: 77 µs against 191 for 512 × 10 and a batch of 10


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        out = cast(weights, torch.bfloat16)
        ctx.mark_non_differentiable(*(t for t, needed in zip(out, ctx.needs_input_grad) if not needed))
        ctx.set_materialize_grads(False)            # a layer that did not run has no gradient, not zeros
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        there = [g for g in grads if g is not None]
        wide = iter([g.float() for g in there] if torch.is_grad_enabled() else cast(there, torch.float32))
        return tuple(None if g is None else next(wide) for g in grads)


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of another type, one launch for all. Each lies in memory as its original does."""
    tensors = list(tensors)
    out = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(out, tensors)
    return out


class _Ready:
    """Mixed into a layer: its first call in a pass finds the weights that `Together` laid ready; a second call leaves them to autocast,
    so that gradients of both uses add up in float32, as under autocast."""

    def take_ready(self) -> dict[str, Tensor] | None:
        """For the one call that may use them; None in a later one."""
        ready: dict[str, Tensor] | None = self.__dict__.pop("_ready", None)
        if ready is not None:
            self.__dict__["_runs"] = True
        return ready

    def forward(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        if isinstance(self, nn.Linear) and self.weight.numel() <= SMALL and input.device.type == "cpu":
            self.__dict__.pop("_ready", None)
            with torch.autocast("cpu", enabled=False):
                return super().forward(input.to(self.weight.dtype))  # type: ignore[misc]
        ready = self.take_ready()
        if ready is None:
            return super().forward(input, *args, **settings)  # type: ignore[misc]
        table = self.__dict__["_parameters"]
        kept = dict(table)
        table.update(ready)
        try:
            return super().forward(input, *args, **settings)  # type: ignore[misc]
        finally:
            table.update(kept)


READY: dict[type, type] = {kind: type(kind.__name__, (_Ready, kind), {"__doc__": kind.__doc__}) for kind in _KINDS}


def without_bias(conv: nn.Conv2d, input: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch's convolution, or the one from here, gives before its bias is added; and that bias, in the type of the maps."""
    ready = conv.take_ready() if isinstance(conv, _Ready) else None
    weight, bias = ((ready or {}).get(leaf, getattr(conv, leaf)) for leaf in ("weight", "bias"))
    maps = conv._conv_forward(input, weight, None)
    return maps, bias.to(maps.dtype)


class Together:
    """Casts, at the beginning of a pass, the weights of those layers that ran in an earlier one.

    Layers that never run in a pass (a projection used in a loss alone) must stay out: a loss that trains only them would otherwise reach
    back through the whole model to the one node that all weights share.
    """

    def __init__(self, module: nn.Module) -> None:
        for layer in module.modules():
            if type(layer) in READY:
                layer.__class__ = READY[type(layer)]
        self._layers = [layer for layer in module.modules() if isinstance(layer, _Ready)]

    def __enter__(self) -> None:
        places, weights = [], []
        for layer in self._layers:
            ready: dict[str, Tensor] = {}
            layer.__dict__["_ready"] = ready
            if "_runs" not in layer.__dict__:
                continue
            for leaf in ("weight", "bias"):
                weight = layer._parameters.get(leaf)
                if weight is not None and weight.dtype == torch.float32:
                    places.append((ready, leaf))
                    weights.append(weight)
        if weights:
            learning = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
            for (ready, leaf), narrow in zip(places, _Cast.apply(*weights) if learning else cast(weights, torch.bfloat16)):
                ready[leaf] = narrow

    def __exit__(self, *_: object) -> None:
        self.leave(self._layers)

    def leave(self, layers: Iterable[nn.Module]) -> None:
        """Let these layers run by themselves in the rest of the pass."""
        for layer in layers:
            layer.__dict__.pop("_ready", None)
