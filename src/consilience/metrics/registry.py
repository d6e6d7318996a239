"""Measures by name. A measure is a frozen dataclass whose fields are its options:

    @register
    @dataclass(frozen=True)
    class Mine(Measure):
        \"\"\"What it says, in one line.\"\"\"

        name = "mine"
        power: int = option(2, "an exponent", low=1)

        def measure(self, s: Subject) -> dict[str, Any]:
            return {"answer": s.data.population ** self.power}
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

from ..errors import ConfigError, unknown
from ..options import build, check, describe, format_call, parse_call
from .subject import Subject

ENTRY_POINTS = "consilience.measures"


class Measure:
    """One named measure. `needs` name what must be there; `missing` may say more."""

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()        # of NEEDS
    quick: ClassVar[bool] = True                 # seconds at most: measured when no name is given
    resumable: ClassVar[bool] = False            # it keeps what it has found in `Subject.halfway` and goes on from there
    formula: ClassVar[str] = ""
    judges: ClassVar[bool] = False               # a run can be judged by it: more is better, with "pooled" and "per_client" for each model

    def __post_init__(self) -> None:
        check(self, f"the measure {self.name!r}")

    def missing(self, s: Subject) -> str | None:
        """Why it cannot be measured here, or None."""
        return None

    def measure(self, s: Subject) -> dict[str, Any]:
        """Numbers, text, and lists and tables of them."""
        raise NotImplementedError

    def why_not(self, s: Subject) -> str | None:
        reasons = (NEEDS[need](s) for need in self.needs)
        return next((r for r in reasons if r), None) or self.missing(s)

    @property
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]


NEEDS: dict[str, Any] = {
    "classification": lambda s: None if s.data.task == "classification" else "it is defined for labels, but the data have masks",
    "segmentation": lambda s: None if s.data.task == "segmentation" else "it is defined for masks, but the data have labels",
    "scores": lambda s: None if any(r.get("personalised") for r in s.records) else "no round was scored",
    "records": lambda s: None if s.records else "there are no records",
    "reference": lambda s: None if s.reference else "it compares with another run: name its folder with --reference",
}

M = TypeVar("M", bound=type[Measure])
MEASURES: dict[str, type[Measure]] = {}


def register(cls: M) -> M:
    """Make a measure known by its name."""
    where = f"The measure {cls.__name__}"
    if not (isinstance(cls, type) and issubclass(cls, Measure) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):
        raise ConfigError(f"{where} must be a frozen dataclass derived from consilience.metrics.registry.Measure.")
    if not cls.name:
        raise ConfigError(f"{where} has no name: add `name = \"…\"` to the class.")
    if MEASURES.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise ConfigError(f"{where} takes the name {cls.name!r}, which {MEASURES[cls.name].__name__} has already.")
    wrong = [need for need in cls.needs if need not in NEEDS]
    if wrong:
        raise unknown(f"need of the measure {cls.name!r}:", wrong[0], NEEDS)
    MEASURES[cls.name] = cls
    return cls


@cache
def _register_installed() -> None:
    """Once in a process: looking through what is installed takes milliseconds, and a recipe asks for every cell."""
    package = importlib.import_module(f"{__package__}.measures")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    for point in entry_points(group=ENTRY_POINTS):
        register(point.load())


def installed_measures() -> dict[str, type[Measure]]:
    """Our own, those registered, and those that installed packages announce under the entry-point group `consilience.measures`."""
    _register_installed()
    return dict(sorted(MEASURES.items()))


def make_measures(names: Sequence[str], options: Mapping[str, Any] | None = None) -> list[Measure]:
    """Measures from names, as in mdl or mdl(steps=500), and options by path, as in {'mdl.steps': 500}."""
    known = installed_measures()
    values: dict[str, dict[str, Any]] = {}
    for text in names:
        name, given = parse_call(text, "A measure") if "(" in text else (text, {})
        if name not in known:
            raise unknown("measure", name, known)
        if name in values and _measure(known[name], values[name]) != _measure(known[name], given):       # results are kept by name
            raise ConfigError(f"The measure {name!r} is asked for twice with different options. Take one of them after the other, with "
                              "`consilience measure`.")
        values.setdefault(name, given)
    for path, value in (options or {}).items():
        name, _, key = path.partition(".")
        if name not in known:
            raise unknown("measure", name, known)
        if name not in values:
            raise ConfigError(f"The option {path!r} is for the measure {name!r}, which is not among those asked for: "
                              f"{', '.join(values) or 'none'}.")
        values[name][key] = value
    return [_measure(known[name], given) for name, given in values.items()]


def _measure(cls: type[Measure], given: Mapping[str, Any]) -> Measure:
    return build(cls, given, f"The measure {cls.name!r}")


def canonical(text: str) -> str:
    """One way of writing a measure, for settings that are compared: f1(positive='died') is f1(positive=died), auroc(rows=auto) is auroc.
    What cannot be read, or is not installed here, stays as it is."""
    if "(" not in text:
        return text
    try:
        (one,) = make_measures([text])
    except ConfigError:
        return text
    usual = {f.name: f.default for f in dataclasses.fields(one)}  # type: ignore[arg-type]
    return format_call(one.name, {k: v for k, v in one.settings.items() if v != usual[k]}, bare=True)


def describe_measures() -> list[dict[str, Any]]:
    """Every measure with its meaning, needs and options, ready for a table or JSON."""
    return [{"name": name, "meaning": (cls.__doc__ or "").strip().split("\n")[0], "formula": cls.formula, "needs": list(cls.needs),
             "quick": cls.quick, "options": describe(cls)} for name, cls in installed_measures().items()]


def as_plain(value: Any) -> Any:
    """JSON's own types; what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(k): as_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
