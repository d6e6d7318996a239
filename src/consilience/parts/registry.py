"""The parts by name: every file of this package may hold one; packages and single files from outside may bring more."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ..core.part import Part
from ..errors import ConfigError, unknown

ENTRY_POINTS = "consilience.parts"
_NOT_PARTS = ("registry", "presets", "stack")


def _parts_of(module: ModuleType) -> dict[str, type[Part]]:
    return {value.name: value for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Part) and value is not Part and value.__module__ == module.__name__}


def _discover() -> dict[str, type[Part]]:
    package = __name__.rpartition(".")[0]
    found: dict[str, type[Part]] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.name not in _NOT_PARTS and not info.name.startswith("_"):
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
    return cls


def load_outside(token: str) -> type[Part]:
    """'./mine.py:MyPart' or 'package.module:MyPart' → the class."""
    place, _, name = token.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser()
        if not path.is_file():
            raise ConfigError(f"There is no file {place!r} to take the part {name!r} from.")
        alias = f"consilience_outside_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(alias, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module                       # dataclasses look their module up by name
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"The file {place!r} cannot be loaded: {type(error).__name__}: {error}") from error
    else:
        try:
            module = importlib.import_module(place)
        except Exception as error:                        # its own mistakes, or a name no module can have
            raise ConfigError(f"The module {place!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise unknown(f"class in {place!r}", name, [cls.__name__ for cls in _parts_of(module).values()])
    return check_class(getattr(module, name), f"{place}:{name}")


def find_part(token: str) -> type[Part]:
    """A part by its name, or from a file or module of the user's."""
    if ":" in token:
        return load_outside(token)
    parts = installed_parts()
    if token not in parts:
        raise unknown("part", token, parts)
    return parts[token]
