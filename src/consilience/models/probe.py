"""Look at a model from outside: what its points are, and whether a layout fits it. Nothing of the model is changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import rng
from ..core.layout import Layout
from ..errors import ConfigError, did_you_mean
from .droppath import can_be_keyed


class Point(NamedTuple):
    """A module whose output can be tapped. `fires` and `shape` (per sample) are known when a sample was given."""

    name: str
    kind: str
    parameters: int
    fires: int | None = None
    shape: tuple[int, ...] | None = None


class Pass(NamedTuple):
    """One forward pass in train mode: what fired, in which order, and which module drew random numbers by itself."""

    fired: tuple[str, ...]                          # names in the order of their outputs, with repetitions
    entered: dict[str, tuple[int, ...] | None]      # shape of what each module received; None: no tensor
    left: dict[str, tuple[int, ...] | None]         # shape of what it gave
    drew: str | None                                # the innermost module that moved the generator; "": the model


def run_once(module: nn.Module, sample: Tensor | Sequence[int]) -> Pass:
    """Run a copy of the module once in train mode on a batch, or on two samples of normal numbers of the given shape.

    Layers whose draws can be keyed are put in eval mode, so that a moved generator means a draw that cannot be.
    """
    x = sample if isinstance(sample, Tensor) else rng.normal(rng.key(0, "probe"), (2, *sample))
    copied = copy.deepcopy(module).train()
    fired: list[str] = []
    entered: dict[str, tuple[int, ...] | None] = {}
    left: dict[str, tuple[int, ...] | None] = {}
    drew: list[str] = []
    before: dict[str, Tensor] = {}

    def enter(name: str, args: tuple) -> None:
        entered.setdefault(name, _shape(args[0]) if args else None)
        before[name] = torch.get_rng_state()

    def leave(name: str, out: object) -> None:
        fired.append(name)
        left.setdefault(name, _shape(out))
        if not torch.equal(before[name], torch.get_rng_state()):
            drew.append(name)                       # inner modules leave first, so the first is the innermost

    for name, layer in copied.named_modules():
        if can_be_keyed(layer):
            layer.eval()
        if name:
            layer.register_forward_pre_hook(lambda _, args, name=name: enter(name, args))
            layer.register_forward_hook(lambda _, args, out, name=name: leave(name, out))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        start = torch.get_rng_state()
        try:
            result = copied(x)
        except Exception as error:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"The model {type(module).__name__} fails on a batch of shape {tuple(x.shape)} of "
                              f"{x.dtype}: {first_line}") from error
        if not isinstance(result, Tensor):
            raise ConfigError(f"The model {type(module).__name__} must give its logits as one tensor. "
                              f"Got {type(result).__name__} instead.")
        if not drew and not torch.equal(start, torch.get_rng_state()):
            drew.append("")
    return Pass(tuple(fired), entered, left, drew[0] if drew else None)


def describe_points(module: nn.Module, sample: Tensor | Sequence[int] | None = None) -> list[Point]:
    """Every module whose output can be tapped; with a sample, how often it fires and what shape it gives."""
    seen = run_once(module, sample) if sample is not None else None
    points = []
    for name, layer in module.named_modules():
        if name:
            fires = seen.fired.count(name) if seen else None
            points.append(Point(name, type(layer).__name__, sum(p.numel() for p in layer.parameters()), fires,
                                seen.left.get(name) if seen else None))
    return points


def check_layout(module: nn.Module, layout: Layout, sample: Tensor | Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shape, per sample, at every point of the layout; a ConfigError says at once what does not fit.

    Refused: names the model does not have; points that never fire or fire twice; stages that give no maps; modules
    listed against the order of the forward pass; and draws from torch's global generator that no key can replace.
    """
    points = describe_points(module)
    names = [p.name for p in points]
    for role, name in _named(layout):
        if name not in names:
            raise ConfigError(f"The model {type(module).__name__} has no module {name!r}, named as {role}."
                              f"{did_you_mean(name, names)}")
    seen = run_once(module, sample)
    once = [n for n in names if seen.fired.count(n) == 1]
    shapes: dict[str, tuple[int, ...]] = {}
    for role, name in _named(layout):
        times = seen.fired.count(name)
        if times != 1:
            runs = f"runs {times} times" if times else "never runs"
            raise ConfigError(f"{name!r}, named as {role}, {runs} in a forward pass; name a module that runs once. "
                              f"Those are: {', '.join(once) or 'none'}.")
        shape = seen.left[name]
        if shape is None:
            raise ConfigError(f"{name!r}, named as {role}, does not give a tensor; name one inside or after it.")
        shapes[name] = shape
    for name in layout.stages:
        if len(shapes[name]) < 2:
            raise ConfigError(f"Stage {name!r} gives one vector of shape {shapes[name]} per sample. Stages give maps "
                              "(channels and positions); leave it out of the stages.")
    _in_order("stages and the head", (*layout.stages, layout.head), seen.fired)
    _in_order("extractor, header and head", (*layout.extractor, *layout.header, layout.head), seen.fired)
    features = seen.entered[layout.head]
    if features is None:
        raise ConfigError(f"The head {layout.head!r} must receive its features as its first positional argument.")
    if seen.drew is not None:
        where = f"its module {seen.drew!r}" if seen.drew else "its own forward"
        raise ConfigError(f"The model {type(module).__name__} draws from torch's global generator in training "
                          f"({where}), so its runs could not be repeated. Use nn.Dropout layers, whose draws are keyed, "
                          "in place of functional dropout.")
    in_order = {name: shapes[name] for name in sorted(shapes, key=seen.fired.index)}
    return {**in_order, layout.features: features}


def table_of(points: Iterable[Point], most: int = 40) -> str:
    """The points as lines of text, for an error message or a terminal."""
    listed = list(points)
    width = max((len(p.name) for p in listed), default=0)
    lines = [f"  {p.name:<{width}}  {p.kind}{f', gives {p.shape}' if p.shape is not None else ''}"
             f"{f', runs {p.fires} times' if p.fires not in (None, 1) else ''}" for p in listed[:most]]
    return "\n".join(lines + ([f"  … and {len(listed) - most} more"] if len(listed) > most else []))


def _named(layout: Layout) -> list[tuple[str, str]]:
    """(role, module) for every name in a layout, each module once."""
    roles = {layout.head: "the head"}
    for role, names in (("a stage", layout.stages), ("part of the extractor", layout.extractor),
                        ("part of the header", layout.header)):
        for name in names:
            roles.setdefault(name, role)
    return [(role, name) for name, role in roles.items()]


def _in_order(what: str, names: tuple[str, ...], fired: tuple[str, ...]) -> None:
    actual = tuple(sorted(names, key=fired.index))
    if actual != names:
        raise ConfigError(f"The {what} must be listed in the order in which they run: {', '.join(actual)}. "
                          f"Got {', '.join(names)} instead.")


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else None
