"""Tables of TOML files, read strictly: what is not known is refused with the nearest name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, did_you_mean

_TEXTS = ("title", "like", "method", "awaits", "unavailable", "ours", "note", "citation")
_TABLES = ("run", "score", "paper", "cells")
_LISTS = ("readings", "notes", "scaled", "only", "mean_of", "minus", "training", "also", "draw")
_KINDS: dict[str, tuple[type, str]] = {**dict.fromkeys(_TEXTS, (str, "a text")), **dict.fromkeys(_TABLES, (dict, "a table")),
                                       **dict.fromkeys(_LISTS, (list, "a list")), "digits": (int, "a whole number")}
_OF: dict[str, tuple[type, str]] = {**dict.fromkeys(_LISTS, (str, "texts")), **dict.fromkeys(("also", "draw"), (dict, "tables"))}
MOST_DIGITS = 12


@lru_cache(maxsize=64)
def _read_text(path: Path, changed: int) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from None


def read(path: Path) -> dict[str, Any]:
    """What a file holds; read again only when it has changed."""
    return _read_text(path, path.stat().st_mtime_ns)


def table(given: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    """A table with none but these keys, and under them what belongs there."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a table. Got {given!r} instead.")
    for key, value in given.items():
        if key not in keys:
            raise ConfigError(f"{where} has no key {key!r}.{did_you_mean(key, keys)}")
        kind, words = _KINDS.get(key, (object, ""))
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: {key!r} must be {words}. Got {value!r} instead.")
        kind, words = _OF.get(key, (object, ""))
        if isinstance(value, list) and not all(isinstance(one, kind) for one in value):
            raise ConfigError(f"{where}: {key!r} must be a list of {words}. Got {value!r} instead.")
        if key == "digits" and (isinstance(value, bool) or value not in range(MOST_DIGITS + 1)):
            raise ConfigError(f"{where}: 'digits' must be a whole number from 0 to {MOST_DIGITS}. Got {value!r} instead.")
    return dict(given)


def entries(whole: Mapping[str, Any], kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables below one, by name and in order."""
    found = whole.get(kind, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{kind} must be tables, as in [{kind}.name].")
    return list(found.items())


def text(given: Mapping[str, Any], key: str, where: str) -> str:
    """A text that must be there."""
    if not isinstance(given.get(key), str):
        raise ConfigError(f"{where} needs a {key}.")
    return given[key]


def one_of(value: Any, known: Sequence[Any], where: str) -> None:
    """Refuse what is not among the known values."""
    if value not in known:
        raise ConfigError(f"{where} must be one of {', '.join(repr(k) for k in known if k is not None)}. Got {value!r} instead.")
