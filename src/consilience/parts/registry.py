"""The parts by name: every file of this package may hold one; packages and single files from outside may bring more."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

from ..core.part import HOOKS, Part
from ..errors import ConfigError, did_you_mean, unknown
from ..loading import hint_of_script, load_file

ENTRY_POINTS = "consilience.parts"
_NOT_PARTS = ("registry", "presets", "stack")


def _parts_of(module: ModuleType) -> dict[str, type[Part]]:
    return {value.name: value for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Part) and value is not Part and value.__module__ == module.__name__}


def _discover() -> dict[str, type[Part]]:
    package = __name__.rpartition(".")[0]
    found: dict[str, type[Part]] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not info.ispkg and info.name not in _NOT_PARTS and not info.name.startswith("_"):
            found.update(_parts_of(importlib.import_module(f"{package}.{info.name}")))
    return dict(sorted(found.items()))


PARTS: dict[str, type[Part]] = _discover()


@cache
def installed_parts() -> dict[str, type[Part]]:
    """Our own parts and those that installed packages announce under the entry-point group `consilience.parts`."""
    found = dict(PARTS)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in found:
            raise ConfigError(f"The package {point.dist.name if point.dist else '?'!r} brings a part {point.name!r}, "
                              "but that name is taken. Ask its authors to rename it.")
        found[point.name] = check_class(point.load(), f"entry point {point.name!r}")
    return found


def check_class(cls: object, where: str) -> type[Part]:
    """A class that can be used as a part, or an error that says what it lacks."""
    if not (isinstance(cls, type) and issubclass(cls, Part)):
        raise ConfigError(f"{where} is not a part: it must be a class derived from consilience.Part.")
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):
        raise ConfigError(f"{where} must be a frozen dataclass: put @dataclass(frozen=True) above it.")
    if not cls.name:
        raise ConfigError(f"{where} has no name: add `name = \"…\"` to the class.")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"The field {field.name!r} of {where} has no default: write {field.name}: … = option(value, \"what it is\").")
    for hook in HOOKS:
        if not callable(getattr(cls, hook)):              # a value would be called in the midst of a round
            raise ConfigError(f"{where} has an option or a value {hook!r}, but that is the name of a hook, which is a method. "
                              "Give it another name.")
    _check_hooks(cls, where)
    return cls


def _check_hooks(cls: type[Part], where: str) -> None:
    """A hook with a slip in its name would never be called, and FedAvg's numbers would pass for the part's."""
    own = [name for base in cls.__mro__ if base not in (Part, object) for name, value in vars(base).items()
           if inspect.isfunction(value) and not name.startswith("_") and not hasattr(Part, name)]
    missing = [hook for hook in HOOKS if getattr(cls, hook) is getattr(Part, hook)]
    for name in own:
        if near := difflib.get_close_matches(name, missing, n=1, cutoff=0.8):
            raise ConfigError(f"{where} has a method {name!r}, which is no hook and would not be called. Did you mean {near[0]!r}? "
                              "The name of a helper of your own begins with an underscore.")
    if "tap" not in missing and "points" in missing:
        raise ConfigError(f"{where} defines `tap` but not `points`, so its tap would never be called. Say where it listens, as in: "
                          "def points(self, layout): return (layout.features,)")
    if len(missing) == len(HOOKS) and not cls.pools:
        raise ConfigError(f"{where} defines no hook, so it would change nothing. The hooks: {', '.join(HOOKS)}.")


def load_outside(token: str) -> type[Part]:
    """'./mine.py:MyPart' or 'package.module:MyPart' → the class."""
    place, _, name = token.rpartition(":")
    if place.endswith(".py"):
        module = load_file(place, f"the part {name!r}")
    else:
        try:
            module = importlib.import_module(place)
        except Exception as error:                        # its own mistakes, or a name no module can have
            raise ConfigError(f"The module {place!r} cannot be imported: {type(error).__name__}: {error}") from error
    return _class_in(module, place, name)


def _class_in(module: ModuleType, place: str, name: str) -> type[Part]:
    if not hasattr(module, name):
        parts = [cls.__name__ for cls in _parts_of(module).values()]
        others = hint_of_script(place) or did_you_mean(name, parts) or " Nothing in it is derived from consilience.Part."
        raise ConfigError(f"{place!r} has no class {name!r}.{others}")
    return check_class(getattr(module, name), f"{place}:{name}")


def find_part(token: str) -> type[Part]:
    """A part by its name, or from a file or module of the user's."""
    if ":" in token:
        return load_outside(token)
    parts = installed_parts()
    if token not in parts:
        raise unknown("part", token, parts)
    return parts[token]
