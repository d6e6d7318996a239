"""Every data set by name. A source is one module of this package that defines one subclass of `Source`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from ... import options
from ...errors import ConfigError, DataError, unknown
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
_ARRAYS, _TABLE = 'arrays(path="{}")', 'table(path="{}", label=…)'
_READERS = {".npz": _ARRAYS, ".npy": _ARRAYS, ".csv": _TABLE, ".parquet": _TABLE}       # how a file of the user's is named as a source


def make(text: str) -> Source:
    """The source that 'cifar10' or 'folder(path="photos")' names."""
    if reader := _reader_of(text):
        raise ConfigError(f"{text!r} is a file or folder; say how it is to be read, as in --data '{reader}'.")
    name, values = options.parse_call(text, "A data source")
    if name not in SOURCES:
        raise unknown("data source", name, SOURCES, DataError)
    return options.build(SOURCES[name], values, f"source {name!r}")


def _reader_of(text: str) -> str:
    """How a file or folder of the user's is named as a source; empty where the text names none."""
    if text in SOURCES or "(" in text:
        return ""
    reader = _READERS.get(Path(text).suffix.lower(), 'folder(path="{}")' if text and Path(text).is_dir() else "")
    return reader.format(text)
