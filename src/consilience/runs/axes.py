"""What a sweep goes over: lists and ranges of settings, as they are written on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ..errors import ConfigError, did_you_mean
from ..options import hints_of
from ..parts.stack import parse_stack
from .config import DIVIDING, PLACES, RunConfig
from .entries import Entry, applies, targets_of
from .tune import Dimension, at

# Settings that change the samples, the scoring or the luck: scores under different values of them do not say which is better.
NOT_SWEPT = ("method", "settings", "data", *(name for name in DIVIDING if name != "transform"), "proxy", "taps", "eval_every",
             "eval_clients", "measure", "measure_every", "criterion", "patience", "seed", "eval_batch")
NO_CHANGE = ("engine", "device", *PLACES)             # where and how a run is made: its scores are the same
FORM = "A sweep goes over name=value,value,… or name=low:high or name=low:high:log or name=low:high:step, as in prox.mu=0.001,0.01,0.1"


@dataclass(frozen=True)
class Axis:
    """One swept setting: a list of values, or a range of numbers."""

    name: str
    targets: tuple[str, ...]
    text: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False                     # whole numbers only

    @property
    def dimension(self) -> Dimension:
        return Dimension(self.name, self.targets, self.values)

    def distribution(self, optuna: Any) -> Any:
        d = optuna.distributions
        if self.values:
            return d.CategoricalDistribution(self.values)
        if self.whole:
            return d.IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return d.FloatDistribution(self.low, self.high, log=self.log, step=self.step)


def parse_axis(text: str, entry: Entry, base: RunConfig) -> Axis:
    """Read one --over. Every listed value and both ends of a range must be values the run would accept."""
    name, equals, right = (piece.strip() for piece in text.partition("="))
    if not equals or not name or not right:
        raise ConfigError(f"{FORM}. Got {text!r} instead.")
    stack = entry.config(base, base.policy.seed).stack()
    if "." in name:
        if not applies(name, entry.method):
            parse_stack(entry.method, {name: None})         # says which names the method has
        targets = targets_of(name, [p.name for p in stack.parts])
    elif name in (*NOT_SWEPT, *NO_CHANGE) or name not in RunConfig.names():
        raise ConfigError(f"A sweep cannot go over {name!r}: {_why_not(name)}")
    else:
        targets = (name,)
    axis = _range(name, targets, right, entry, base) or Axis(name, targets, right, _list(name, right))
    for value in axis.values or (axis.low, axis.high):
        at(entry, [axis.dimension], {name: value}).config(base, base.policy.seed)
    return axis


def _why_not(name: str) -> str:
    if name in NOT_SWEPT:                                   # the name is right, so no other is meant
        return "it changes what is measured, so that scores would not compare. Give one `consilience compare` or sweep for each value."
    if name in NO_CHANGE:
        return "it does not change a run's scores."
    return f"it is no setting of a run.{did_you_mean(name, [n for n in RunConfig.names() if n not in (*NOT_SWEPT, *NO_CHANGE)])}"


def _list(name: str, text: str) -> tuple[Any, ...]:
    values, depth, start = [], 0, 0
    for i, ch in enumerate(text + ","):
        depth += (ch in "([") - (ch in ")]")
        if ch == "," and depth == 0:
            values.append(_value(text[start:i].strip()))
            start = i + 1
    if len(values) < 2 or len(set(map(repr, values))) < len(values):
        raise ConfigError(f"{FORM}, with two or more different values. Got {name}={text} instead.")
    return tuple(values)


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
        if value is None or isinstance(value, bool):
            return value
    return text


def _range(name: str, targets: Sequence[str], text: str, entry: Entry, base: RunConfig) -> Axis | None:
    pieces = [p.strip() for p in text.split(":")]
    try:
        low, high = float(pieces[0]), float(pieces[1])
    except (ValueError, IndexError):
        return None
    step, log = None, pieces[2:] == ["log"]
    if pieces[2:] and not log:
        try:
            (step,) = map(float, pieces[2:])
        except ValueError:
            raise ConfigError(f"{FORM}. Got {name}={text} instead.") from None
    whole = _whole(targets[0], entry, base)
    if whole and not all(v.is_integer() for v in (low, high, step or 1.0)):
        raise ConfigError(f"The setting {name!r} takes whole numbers, so its range needs whole ends. Got {name}={text} instead.")
    if not low < high or (log and low <= 0) or (step is not None and not 0 < step <= high - low):
        raise ConfigError(f"The range {name}={text} needs a low end below its high end, a low end above 0 with log, and a step that fits.")
    if whole:
        low, high = int(low), int(high)
    return Axis(name, tuple(targets), text, (), low, high, log, step, whole)


def _whole(target: str, entry: Entry, base: RunConfig) -> bool:
    """Whether a setting is declared to take whole numbers."""
    config = entry.config(base, base.policy.seed)
    if "." in target:
        owner, _, option = target.partition(".")
        owners: list[Any] = [p for p in config.stack().parts if p.name == owner]
    else:
        owners, option = [config.policy, config.run], target
    for instance in owners:
        if option in {f.name for f in dataclasses.fields(instance)}:
            hint = hints_of(type(instance))[option]
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            return int in kinds and float not in kinds
    return False
