"""What is asked of recipes: rows, columns, seeds, the share of the rounds; and where the results go."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .format import Cell, Recipe

Selection = tuple[tuple[str, ...], tuple[str, ...]]             # rows and columns; none: all

_ASKED = re.compile(r"^(?P<name>.*\.toml|[^:]*)(?::(?P<rows>[^:]*))?(?::(?P<columns>[^:]*))?$")


def split_names(text: str | None) -> tuple[str, ...]:
    return tuple(n.strip() for n in (text or "").split(",") if n.strip())


def parse_asked(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """'dbe/table5:local,fedavg:fmnist' as recipe, rows and columns; both may be left out."""
    found = _ASKED.match(text)
    if found is None or not found["name"]:
        raise ConfigError(f"A recipe is asked for as NAME, NAME:rows or NAME:rows:columns, as in dbe/table5:local,fedavg:fmnist. "
                          f"Got {text!r} instead.")
    return found["name"], split_names(found["rows"]), split_names(found["columns"])


@dataclass(frozen=True)
class Order:
    """What is asked of a recipe."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: int | None = None                    # how many, from the recipe's first; None: the recipe's own
    scale: float = 1.0                          # of the rounds
    engine: str | None = None
    device: str | None = None
    changed: tuple[tuple[str, str], ...] = ()   # settings of the runs that are not as the recipe has them
    skip: int = 0                               # so many of the recipe's first seeds are left to others
    beside: tuple[Selection, ...] = ()          # rows and columns asked for besides, where one rectangle is not enough

    def __post_init__(self) -> None:
        for name, _ in self.changed:
            if name in ("method", "settings", "seed", "rounds"):
                raise ConfigError(f"The setting {name!r} is the recipe's. Write a recipe of your own to have it otherwise"
                                  + (", or use --rounds-scale." if name == "rounds" else "."))
        if not 0 < self.scale <= 100:
            raise ConfigError(f"The rounds' scale must be above 0 and at most 100. Got {self.scale!r} instead.")
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"The number of seeds must be at least 1. Got {self.seeds} instead.")
        if self.skip < 0:
            raise ConfigError(f"The number of seeds to leave out must be 0 or more. Got {self.skip} instead.")

    def seeds_of(self, recipe: Recipe) -> list[int]:
        known = list(recipe.seeds)
        end = self.skip + (self.seeds or max(1, len(known) - self.skip))
        return (known + list(range(max(known) + 1, max(known) + 1 + end)))[self.skip: end]

    def cells_of(self, recipe: Recipe) -> list[Cell]:
        """The cells asked for, in the order they were asked for: column by column, and the rows as they were named."""
        def place(asked: Sequence[str], name: str) -> int:
            return asked.index(name) if asked else 0
        cells: dict[int, Cell] = {}
        for rows, columns in ((self.rows, self.columns), *self.beside):
            chosen = recipe.select(rows, columns)
            cells |= {id(c): c for c in sorted(chosen, key=lambda c: (place(columns, c.column.name), place(rows, c.row.name)))}
        return list(cells.values())

    def command(self, recipe: Recipe) -> str:
        """As it can be typed, without this machine's places."""
        words = ["consilience", "reproduce"]
        if self.beside:
            words += [":".join([recipe.name, ",".join(rows), ",".join(columns)]).rstrip(":")
                      for rows, columns in ((self.rows, self.columns), *self.beside)]
        else:
            words += [recipe.name, *(["--rows", ",".join(self.rows)] if self.rows else [])]
            words += ["--columns", ",".join(self.columns)] if self.columns else []
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        words += ["--skip-seeds", str(self.skip)] if self.skip else []
        words += ["--rounds-scale", f"{self.scale:g}"] if self.scale != 1.0 else []
        words += [word for name, value in self.changed for word in ("-o", f"{name}={value}")]
        words += ["--engine", self.engine] if self.engine else []
        words += ["--device", self.device] if self.device else []
        return shlex.join(words)


@dataclass(frozen=True)
class Piece:
    """A recipe, what is asked of it, where its results go, and where the runs lie."""

    recipe: Recipe
    order: Order
    out: Path
    runs: Path
