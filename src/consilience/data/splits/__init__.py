"""Splits: who owns which samples. One idea per file; every `Split` in this package is found by its name."""

from __future__ import annotations

import importlib
import pkgutil

from ... import options
from ...errors import unknown
from .base import Assignment, Split

SPLITS: dict[str, type[Split]] = {}

for _module in pkgutil.iter_modules(__path__):
    for _found in vars(importlib.import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_found, type) and issubclass(_found, Split) and _found.name:
            SPLITS[_found.name] = _found


def make(text: str | Split) -> Split:
    """'dirichlet(alpha=0.1)' as a split. Unknown names and settings are refused with the nearest known ones."""
    if isinstance(text, Split):
        return text
    name, values = options.parse_call(text, "A split")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    return options.build(SPLITS[name], values, f"split {name!r}")


from .holdout import draw_clients, hold_out, leave_one_out  # noqa: E402 - after the registry, beside what users call

__all__ = ["SPLITS", "Assignment", "Split", "draw_clients", "hold_out", "leave_one_out", "make"]
