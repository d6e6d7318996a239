"""Weights cast to bfloat16 all at once. The same numbers as autocast's, bit for bit, in two launches instead of two per weight.

Autocast casts a layer's weight when the layer runs, and its gradient back when that arrives. Here a pass begins by casting the weights
of all layers it will run, and one node casts all their gradients back. A layer sees the cast weight during its own call only: who else
reads it (a loss on the head's weights, a module of the user) reads the float32 parameter, as under autocast.

A step may also take the gradients as they come (`collecting`), to descend without casting them back, and hand on the cast weights that it
has brought up to date (`keep`). Of kernels larger than their maps only the part is cast that meets them (`reach`), and on a GPU strided
convolutions of few channels are folded (`folding`), those of few products and some of small maps computed by kernels of ours (`stem`,
`small_conv`); there alone the order of sums is not autocast's.

One exception: on a CPU small linear layers, heads above all, stay in float32. There bfloat16 costs more to set up than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..channels_last import is_turned
from ..kernels import small_conv, stem
from ..kernels.derivatives import transformed
from ..kernels.reach import Reach, reach
from .folding import fold_of, folded

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SMALL = 2**16        # weights of a linear layer; up to here float32 is faster on CPUs: 77 µs against 191 for 512 × 10 and a batch of 10


class Arrived(NamedTuple):
    """The gradient of a cast weight as it came, not cast back."""

    weight: Tensor                # the parameter, in float32
    cast: Tensor                  # what the pass computed with: all of it, or what is in reach
    grad: Tensor                  # alike
    reach: Reach | None


class _Collector:
    """Gradients of the weights that are `wanted`, by id, go into a list and not to autograd."""

    wanted: frozenset[int] = frozenset()
    into: list[Arrived]


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collector: _Collector, reaches: list[Reach | None], kept: list[Tensor | None],
                *weights: Tensor) -> tuple[Tensor, ...]:
        out = narrowed(weights, reaches, kept)
        ctx.mark_non_differentiable(*(t for t, needed in zip(out, ctx.needs_input_grad[3:]) if not needed))
        ctx.set_materialize_grads(False)            # a layer that did not run has no gradient, not zeros
        # others of the same memory: the node must not hold on to what holds on to it
        ctx.collector, ctx.weights, ctx.reaches, ctx.cast = collector, weights, reaches, [t.detach() for t in out]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        there = {i: Arrived(weight, narrow, g, part) for i, (weight, narrow, g, part)
                 in enumerate(zip(ctx.weights, ctx.cast, grads, ctx.reaches)) if g is not None}
        if torch.is_grad_enabled():
            wide = [_spread(a.weight, a.grad.float(), a.reach) for a in there.values()]
        else:
            wanted = [i for i, a in there.items() if id(a.weight) in ctx.collector.wanted]
            if wanted:
                ctx.collector.into += [there.pop(i) for i in wanted]
            wide = widened([*there.values()])       # of weights that are mixed from others, say: autograd goes on from here
        back = dict(zip(there, wide))
        return None, None, None, *(back.get(i) for i in range(len(grads)))


def _spread(weight: Tensor, grad: Tensor, part: Reach | None) -> Tensor:
    """A gradient with zeros where its weight is out of reach; it can be differentiated."""
    if part is None:
        return grad
    (top, bottom, _), (left, right, _) = part
    return F.pad(grad, (left, weight.shape[3] - right, top, weight.shape[2] - bottom))


def widened(arrived: list[Arrived]) -> list[Tensor]:
    """The gradients in float32, each of its weight's size. One launch for those that are whole."""
    whole = iter(cast([a.grad for a in arrived if a.reach is None], torch.float32))
    out = []
    for a in arrived:
        if a.reach is None:
            out.append(next(whole))
        else:
            out.append(torch.zeros_like(a.weight))
            a.reach.of(out[-1]).copy_(a.grad)
    return out


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of another type, one launch for all. Each lies in memory as its original does."""
    tensors = list(tensors)
    out = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if tensors:
        torch._foreach_copy_(out, tensors)
    return out


def narrowed(weights: Iterable[Tensor], reaches: Iterable[Reach | None], kept: Iterable[Tensor | None]) -> list[Tensor]:
    """The weights in bfloat16, as far as they are in reach; those that were kept are there already."""
    out: list[Tensor | None] = []
    whole: list[Tensor] = []
    for weight, part, ready in zip(weights, reaches, kept):
        if ready is not None:
            out.append(ready.detach())
        elif part is None:
            out.append(None)
            whole.append(weight)
        else:                                       # by itself: launches for many take none that have gaps
            piece = part.of(weight)
            out.append(torch.empty_like(piece, dtype=torch.bfloat16).copy_(piece))
    copies = iter(cast(whole, torch.bfloat16))
    return [next(copies) if t is None else t for t in out]


def _autocast(input: Tensor) -> bool:
    return torch.is_autocast_enabled(input.device.type)


@dataclass
class _Seen:
    """What passes have shown of a layer, and what the present one has laid ready for it."""

    runs: bool = False                          # in some pass
    size: tuple[int, ...] | None = None         # of the map that a convolution last saw
    reach: Reach | None = None                  # what of its kernel meets such a map
    ready: dict[str, Tensor] | None = None      # its weights, cast, of the kernel what is in reach; None when they are taken


class _Ready:
    """Mixed into a layer: its first call in a pass finds the weights that `Together` laid ready; a second call leaves them to autocast,
    so that gradients of both uses add up in float32, as under autocast."""

    _seen: _Seen

    def take_ready(self, input: Tensor) -> tuple[dict[str, Tensor], Reach | None]:
        """For the one call that may use them: the cast weights, and what of its kernel a convolution computes by. In a later call, and on
        a map that meets another part of the kernel, what is in reach alone: what a layer computes is not to depend on what it saw before,
        and checkpointed layers run again on the way back.
        """
        seen = self._seen
        ready, seen.ready = seen.ready, None
        if ready is None:
            return {}, reach(self, *input.shape[-2:]) if isinstance(self, nn.Conv2d) and _autocast(input) else None
        seen.runs = True
        if isinstance(self, nn.Conv2d):
            size, cut = tuple(input.shape[-2:]), seen.reach
            if seen.size != size:
                seen.size, seen.reach = size, reach(self, *size)
            if seen.reach != cut:
                return {}, seen.reach
        return ready, seen.reach

    def forward(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        if isinstance(self, nn.Linear) and self.weight.numel() <= SMALL and input.device.type == "cpu":
            self._seen.ready = None
            with torch.autocast("cpu", enabled=False):
                return super().forward(input.to(self.weight.dtype))  # type: ignore[misc]
        ready, part = self.take_ready(input)
        if isinstance(self, nn.Conv2d):
            bias = ready.get("bias", self.bias)
            if part is not None:
                return _convolved(self, input, part, ready, bias)
            if bias is None and _is_stem(self, input):
                return stem.convolved(self, input, ready.get("weight", self.weight).to(torch.bfloat16))
            fold = fold_of(self, *input.shape[-2:]) if _folds(self, input) else None
            if fold is not None:
                return folded(input, ready.get("weight", self.weight), bias, fold, torch.bfloat16)
            ours = _ours(self, input, ready.get("weight", self.weight), self.padding) if bias is None else None
            if ours is not None:
                return ours
        table = self.__dict__["_parameters"]
        kept = dict(table)
        table.update(ready)
        try:
            return super().forward(input, *args, **settings)  # type: ignore[misc]
        finally:
            table.update(kept)


def _folds(conv: nn.Conv2d, input: Tensor) -> bool:
    """Whether cuDNN would pad the channels, in maps that have them side by side."""
    return input.is_cuda and input.dim() == 4 and _autocast(input) and is_turned(conv.weight)


def _is_stem(conv: nn.Conv2d, input: Tensor) -> bool:
    """Whether there is a kernel for a convolution of so few products."""
    return input.is_cuda and _autocast(input) and not transformed() and stem.usable(conv, input)


def _ours(conv: nn.Conv2d, input: Tensor, weight: Tensor, padding: Any) -> Tensor | None:
    """The convolution without a bias, where a kernel of ours computes some pass of it, and None elsewhere."""
    if not (input.is_cuda and input.dim() == 4 and _autocast(input)) or transformed() or conv.padding_mode != "zeros":
        return None
    if not (is_turned(input) or is_turned(conv.weight)) or not conv.weight.is_contiguous(memory_format=torch.channels_last):
        return None
    found = small_conv.ways_of(input, weight, conv.stride, padding, conv.dilation, conv.groups)
    return None if found is None else small_conv.convolved(input, weight, *found)


READY: dict[type, type] = {kind: type(kind.__name__, (_Ready, kind), {"__doc__": kind.__doc__}) for kind in _KINDS}


def _convolved(conv: nn.Conv2d, input: Tensor, part: Reach, ready: dict[str, Tensor], bias: Tensor | None) -> Tensor:
    """By what is in reach of the kernel, cast or to be cast."""
    weight = ready["weight"] if "weight" in ready else part.of(conv.weight)
    ours = _ours(conv, input, weight, part.padding) if bias is None else None
    return ours if ours is not None else F.conv2d(input, weight, bias, conv.stride, part.padding, conv.dilation, conv.groups)


def without_bias(conv: nn.Conv2d, input: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch's convolution, or the one from here, gives before its bias is added; and that bias, in the type of the maps."""
    ready, part = conv.take_ready(input) if isinstance(conv, _Ready) else ({}, None)
    weight, bias = ready.get("weight", conv.weight), ready.get("bias", conv.bias)
    if part is not None:
        maps = _convolved(conv, input, part, ready, None)
    elif _is_stem(conv, input):
        maps = stem.convolved(conv, input, weight.to(torch.bfloat16))
    else:
        ours = _ours(conv, input, weight, conv.padding)
        maps = ours if ours is not None else conv._conv_forward(input, weight, None)
    assert bias is not None
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
                assert isinstance(layer, _Ready)
                layer._seen = _Seen()
        self._layers = [layer for layer in module.modules() if isinstance(layer, _Ready)]
        self._collector = _Collector()
        # id of a parameter -> itself in bfloat16, where a step has brought that up to date, and what of it
        self._kept: dict[int, tuple[Tensor, Reach | None]] = {}

    def __enter__(self) -> None:
        places: list[tuple[dict[str, Tensor], str]] = []
        weights: list[Tensor] = []
        reaches: list[Reach | None] = []
        for layer in self._layers:
            ready: dict[str, Tensor] = {}
            layer._seen.ready = ready
            if not layer._seen.runs:
                continue
            for leaf in ("weight", "bias"):
                weight = layer._parameters.get(leaf)
                if weight is not None and weight.dtype == torch.float32:
                    places.append((ready, leaf))
                    weights.append(weight)
                    reaches.append(layer._seen.reach if leaf == "weight" else None)
        if weights:
            learning = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
            known = [self._kept.get(id(w), (None, None)) for w in weights]
            kept = [narrow if part == cut else None for (narrow, cut), part in zip(known, reaches)]
            narrow = _Cast.apply(self._collector, reaches, kept, *weights) if learning else narrowed(weights, reaches, kept)
            for (ready, leaf), t in zip(places, narrow):
                ready[leaf] = t

    def __exit__(self, *_: object) -> None:
        self.leave(self._layers)

    def leave(self, layers: Iterable[nn.Module]) -> None:
        """Let these layers run by themselves in the rest of the pass."""
        for layer in layers:
            if isinstance(layer, _Ready):
                layer._seen.ready = None

    def cut_kernels(self) -> list[Tensor]:
        """Kernels of which the last pass needed a part alone."""
        kernels = [layer._parameters.get("weight") for layer in self._layers if layer._seen.reach is not None]
        return [kernel for kernel in kernels if kernel is not None]

    @contextmanager
    def collecting(self, weights: Iterable[Tensor]) -> Iterator[list[Arrived]]:
        """What arrives in the meantime for these weights, cast, is collected, and autograd has none of it."""
        self._collector.wanted, self._collector.into = frozenset(map(id, weights)), []
        try:
            yield self._collector.into
        finally:
            self._collector.wanted, self._collector.into = frozenset(), []

    def keep(self, weight: Tensor, narrow: Tensor, part: Reach | None) -> None:
        """The next passes need not cast this weight, as far as it is in reach: `narrow` is what they would get."""
        self._kept[id(weight)] = narrow, part

    def forget(self, weights: Iterable[Tensor] | None = None) -> None:
        """These weights, or all, are cast again in the next pass: they may have changed."""
        for key in list(self._kept) if weights is None else map(id, weights):
            self._kept.pop(key, None)
