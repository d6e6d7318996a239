"""Every data set by name. A source is one module of this package that defines one subclass of `Source`."""

from __future__ import annotations

import importlib
import pkgutil

from ... import options
from ...errors import DataError, unknown
from .base import Download, Source, Wanted

__all__ = ["SOURCES", "Download", "Source", "Wanted", "make"]


def _discover() -> dict[str, type[Source]]:
    """Modules whose name starts with an underscore, and `base`, hold helpers."""
    found: dict[str, type[Source]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_") or info.name == "base":
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Source) and value.__module__ == module.__name__:
                found[value.name] = value
    return found


SOURCES: dict[str, type[Source]] = _discover()


def make(text: str) -> Source:
    """The source that 'cifar10' or 'folder(path="photos")' names."""
    name, values = options.parse_call(text, "A data source")
    if name not in SOURCES:
        raise unknown("data source", name, SOURCES, DataError)
    return options.build(SOURCES[name], values, f"source {name!r}")
