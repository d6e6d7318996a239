"""Read recipes strictly: unknown keys are refused, and every method, option, data set, split and model must exist."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConsilienceError, unknown
from ..metrics.registry import make_measures
from ..metrics.subject import TRAINING
from ..parts.presets import PRESETS
from ..parts.registry import installed_parts
from ..report.curves import SCORE_NAMES
from ..runs.config import flatten_settings
from . import tables
from .check import applies, check_method, check_run, method_facts
from .format import DEFAULT_ROUNDS, DRAWINGS, UNITS, Also, Cell, Column, Drawing, Recipe, Row, Score, parse_printed
from .protocol import check_taken, score_of, stands_beside
from .tables import one_of

MOST_SEEDS = 1000
COUNTED_IN_ROUNDS = ("eval_every", "measure_every", "patience")        # settings of a run that may shrink with its rounds
_NAME = re.compile(r"^(table|figure)[1-9][0-9]*$")
_PAPER_KEYS = ("citation", "seeds", "unit", "digits", "readings", "run", "score", "rows", "columns")
_RECIPE_KEYS = ("title", "seeds", "unit", "digits", "readings", "notes", "run", "score", "also", "rows", "columns", "draw", "scaled",
                "unavailable")
_COLUMN_KEYS = ("title", "like", "run", "score", "unit", "digits", "x", "mean_of", "minus", "ours", "unavailable", "note")
_ROW_KEYS = ("title", "like", "method", "awaits", "run", "score", "paper", "cells", "only", "ours", "unavailable", "note")
_CELL_KEYS = ("method", "run", "score", "unavailable", "note")
_ALSO_KEYS = ("title", "score")
_DRAW_KEYS = ("kind", "title", "x", "y", "measure", "colour", "model", "training", "together", "client", "sample_class", "columns")


def recipes_folder() -> Path:
    return Path(str(files(__package__)))


def recipe_names() -> list[str]:
    """All recipes of the package, papers in order, tables before figures, by number."""
    found = [p for p in recipes_folder().glob("*/*.toml") if _NAME.match(p.stem)]
    number = lambda p: (p.parent.name, p.stem.startswith("figure"), int(re.sub(r"\D", "", p.stem)))
    return [f"{p.parent.name}/{p.stem}" for p in sorted(found, key=number)]


def load_recipe(name: str | Path) -> Recipe:
    """A recipe of the package by name (dbe/table5), or one of the user's by the path of its file (mine.toml)."""
    text = str(name)
    if text.endswith(".toml"):
        path, title = Path(text), Path(text).name
        if not path.is_file():
            raise ConfigError(f"There is no recipe file {text!r}.")
    else:
        if own := [n for n in recipe_names() if n.startswith(f"{text.rstrip('/')}/")]:
            raise ConfigError(f"{text!r} is a paper, and a recipe is one of its tables or figures: {', '.join(own)}.")
        if text not in recipe_names():
            raise unknown("recipe", text, recipe_names())
        path, title = recipes_folder() / f"{text}.toml", text
    try:
        return _Reader(path, title).recipe()
    except ConsilienceError as error:
        raise type(error)(f"Recipe {title}: {error}") from None


class _Reader:
    """One file, on top of the paper.toml beside it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.own = tables.table(tables.read(path), _RECIPE_KEYS, path.name)
        shared = path.with_name("paper.toml")
        self.paper = tables.table(tables.read(shared), _PAPER_KEYS, "paper.toml") if shared.is_file() else {}
        self.kind = "figure" if path.stem.startswith("figure") or self.own.get("draw") else "table"

    def recipe(self) -> Recipe:
        if "title" not in self.own:
            raise ConfigError("there is no title.")
        whole = self.own.get("unavailable")
        columns = tuple(self.column(n, v) for n, v in tables.entries(self.own, "columns"))
        rows = tuple(self.row(n, v, [c.name for c in columns]) for n, v in tables.entries(self.own, "rows"))
        drawings = tuple(self.drawing(d, [c.name for c in columns]) for d in self.own.get("draw", ()))
        # pictures of data need no method, but a run's settings say which data
        lines = rows or ((Row("split", "split", "fedavg"),) if drawings and all(d.kind == "splits" for d in drawings) else ())
        if not whole and (not columns or not lines):
            raise ConfigError("it has no rows or no columns. Add them, or say why with unavailable = \"…\".")
        also = tuple(Also(tables.text(a, "title", "also"), tables.table(a, _ALSO_KEYS, "also").get("score", {}))
                     for a in self.own.get("also", ()))
        cells = tuple(self.cell(r, c, also, whole) for r in lines for c in columns if not r.only or c.name in r.only)
        self.references_exist(cells, columns)
        self.every_setting_is_used(rows, columns)
        self.what_shrinks_exists(cells)
        readings = (*self.paper.get("readings", ()), *self.own.get("readings", ()))
        return Recipe(self.name, self.own["title"], self.paper.get("citation", ""), self.kind, rows, columns, cells,
                      _seeds(self.own.get("seeds", self.paper.get("seeds", 1))), readings, tuple(self.own.get("notes", ())),
                      drawings, tuple(self.own.get("scaled", ())), whole)

    # ---- rows and columns ------------------------------------------------------------------------------------------

    def _shared(self, kind: str, name: str, given: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """What a row or column says, on top of the entry of paper.toml with its name or the one `like` names."""
        where = f"{kind}.{name}"
        own = tables.table(given, keys, where)
        library = self.paper.get(kind, {})
        like = own.get("like", name)
        if "like" in own and like not in library:
            raise unknown(f"entry of paper.toml for {where}.like:", like, library)
        base = tables.table(library.get(like, {}), keys, f"paper.toml, {kind}.{like}")
        merged = {**base, **own}
        for table in ("run", "score"):
            if table in base or table in own:
                merged[table] = _merge(base.get(table, {}), own.get(table, {}))
        return merged

    def column(self, name: str, given: Mapping[str, Any]) -> Column:
        v = self._shared("columns", name, given, _COLUMN_KEYS)
        one_of(v.get("unit"), (None, *UNITS), f"columns.{name}.unit")
        if given.get("mean_of") and "run" in given:
            raise ConfigError(f"columns.{name} is a mean of others, so that its run is never made: leave one of them out.")
        if v.get("minus") and not v.get("mean_of"):
            raise ConfigError(f"columns.{name}.minus needs mean_of, as in mean_of = [\"a\"], minus = [\"b\"].")
        if v.get("x") is not None and (isinstance(v["x"], bool) or not isinstance(v["x"], (int, float)) or not math.isfinite(v["x"])):
            raise ConfigError(f"columns.{name}: 'x' is the column's place on an axis, a number. Got {v['x']!r} instead.")
        return Column(name, v.get("title", name), v.get("run", {}), v.get("score", {}), v.get("unit"), v.get("digits"), v.get("x"),
                      tuple(v.get("mean_of", ())), tuple(v.get("minus", ())), v.get("ours"), v.get("unavailable"), v.get("note", ""))

    def row(self, name: str, given: Mapping[str, Any], columns: Sequence[str]) -> Row:
        v = self._shared("rows", name, given, _ROW_KEYS)
        where = f"rows.{name}"
        for key in ("paper", "cells"):
            for column in v.get(key, {}):
                if column not in columns:
                    raise unknown(f"column in {where}.{key}:", column, columns)
        for column in v.get("only", ()):
            if column not in columns:
                raise unknown(f"column in {where}.only:", column, columns)
        paper = {c: parse_printed(p, f"{where}.paper.{c}") for c, p in v.get("paper", {}).items()}
        if v.get("ours") and paper:
            raise ConfigError(f"{where} is marked as ours, but has values of the paper.")
        why = v.get("unavailable")
        awaits = v.get("awaits")
        if awaits and awaits not in PRESETS and awaits not in installed_parts():
            why = why or f"the method {awaits} is not implemented yet"
        method = v.get("method", awaits or "")
        if not method and not why:
            raise ConfigError(f"{where} has no method.")
        return Row(name, v.get("title", name), method, v.get("run", {}), v.get("score", {}), paper,
                   {c: tables.table(t, _CELL_KEYS, f"{where}.cells.{c}") for c, t in v.get("cells", {}).items()},
                   tuple(v.get("only", ())), v.get("ours"), why, v.get("note", ""))

    def drawing(self, given: Mapping[str, Any], columns: Sequence[str]) -> Drawing:
        v = tables.table(given, _DRAW_KEYS, "draw")
        one_of(v.get("kind"), DRAWINGS, "draw.kind")
        for key in ("x", "y", "measure", "client"):
            if not isinstance(v.get(key, ""), str):
                raise ConfigError(f"draw: {key!r} must be a text. Got {v[key]!r} instead.")
        if not isinstance(v.get("columns", []), list):
            raise ConfigError(f"draw: 'columns' must be a list. Got {v['columns']!r} instead.")
        if v["kind"] == "curves" and "y" in v and not v["y"].startswith("measure:"):
            one_of(v["y"], SCORE_NAMES, "draw.y")
        if v["kind"] == "trace":
            make_measures([v.get("measure", "")])
        for key, known in (("model", ("personalised", "global", "both")), ("colour", ("class", "client")),
                           ("x", ("round", "seconds", "bytes")), ("together", ("row", "figure", "panel"))):
            if key in v:
                one_of(v[key], known, f"draw.{key}")
        for one in v.get("training", ()):
            one_of(one, TRAINING, "draw.training")
        for one in v.get("columns", ()):
            one_of(one, columns, "draw.columns")
        if not isinstance(v.get("sample_class", 0), int) or isinstance(v.get("sample_class"), bool):
            raise ConfigError(f"'draw.sample_class' is the number of a class. Got {v['sample_class']!r} instead.")
        return Drawing(v["kind"], v.get("title", ""), v.get("x", Drawing.x), v.get("y", Drawing.y), v.get("measure", ""),
                       v.get("colour", Drawing.colour), v.get("model", Drawing.model), tuple(v.get("training", Drawing.training)),
                       v.get("together", Drawing.together), v.get("client", ""), v.get("sample_class"), tuple(v.get("columns", ())))

    # ---- cells -----------------------------------------------------------------------------------------------------

    def cell(self, row: Row, column: Column, also: Sequence[Also], whole: str | None) -> Cell:
        own = row.cells.get(column.name, {})
        why = whole or own.get("unavailable") or row.unavailable or column.unavailable
        where = f"row {row.name}, column {column.name}"
        protocol = [self.paper.get("score", {}), self.own.get("score", {}), column.score, row.score, own.get("score", {})]
        try:
            values = None if why or column.mean_of else self.values(row, column, own)
            score = score_of(protocol)
            check_taken(score, values)
            others = tuple((a.title, score_of([*protocol, a.score])) for a in also if stands_beside(score, a.score))
            for one in (score, *(s for _, s in others)):
                _check_round(one, values)
        except ConsilienceError as error:
            raise type(error)(f"{where}: {error}") from None
        unit = column.unit if column.unit is not None else self.own.get("unit", self.paper.get("unit", "%"))
        one_of(unit, UNITS, "unit")
        counted = next(filter(None, (s.no_fraction for s in (score, *(s for _, s in others)))), None)
        if unit == "%" and counted:
            raise ConfigError(f"{where}: it is scored by {counted}, which % would multiply by 100. Set unit = \"\" for the column.")
        digits = column.digits if column.digits is not None else self.own.get("digits", self.paper.get("digits", 2))
        return Cell(row, column, values, score, others, row.paper.get(column.name), unit, digits, why,
                    " ".join(filter(None, (row.note, column.note, own.get("note", "")))))

    def references_exist(self, cells: Sequence[Cell], columns: Sequence[Column]) -> None:
        """Rows and columns that a number is taken from are there, in the same column or row."""
        there = {(c.row.name, c.column.name) for c in cells}
        for cell in cells:
            where = f"row {cell.row.name}, column {cell.column.name}"
            if cell.score.reach_row is not None and (cell.score.reach_row, cell.column.name) not in there:
                raise ConfigError(f"{where}: the row {cell.score.reach_row!r} of its threshold is not in this column.")
            for other in (*cell.column.mean_of, *cell.column.minus):
                if other not in [c.name for c in columns]:
                    raise unknown(f"column in columns.{cell.column.name}.mean_of:", other, [c.name for c in columns])
                if (cell.row.name, other) not in there:
                    raise ConfigError(f"{where}: the row has no column {other!r} to take the mean of.")

    def levels(self, column: Column) -> list[Mapping[str, Any]]:
        """Where settings come from that hold for several rows."""
        return [self.paper.get("run", {}), self.own.get("run", {}), column.run]

    def values(self, row: Row, column: Column, own: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a cell's run, checked."""
        values: dict[str, Any] = {}
        method = own.get("method", row.method)
        for level in self.levels(column):
            level = dict(level)
            settings = flatten_settings(level.pop("settings", {}))
            values = _merge(values, {**level, "settings": {k: v for k, v in settings.items() if applies(k, method)}})
        for level in (row.run, own.get("run", {})):
            values = _merge(values, level)
        if "method" in values or "seed" in values:
            raise ConfigError("the method is the row's, and seeds are the recipe's: leave them out of run.")
        check_method(method, values.get("settings", {}))
        check_run({k: v for k, v in values.items() if k != "settings"})
        return {**values, "method": method}

    def every_setting_is_used(self, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        """A setting of the file or of a column that no row takes is a slip of the pen. Those of paper.toml serve many files."""
        known = [m for r in rows if not r.unavailable for m in (r.method, *(c["method"] for c in r.cells.values() if "method" in c))]
        for level in (self.own.get("run", {}), *(c.run for c in columns if c.name in self.own.get("columns", {}) and not c.unavailable)):
            for path in flatten_settings(level.get("settings", {})):
                if known and not any(applies(path, m) for m in known) and path not in self._library_settings():
                    raise ConfigError(f"the setting {path!r} belongs to none of its methods.")

    def what_shrinks_exists(self, cells: Sequence[Cell]) -> None:
        """A name under `scaled` that no run has would shrink nothing, without a word; and only whole numbers shrink."""
        methods = [method_facts(c.method, c.values.get("settings", {})).options for c in cells if c.values is not None]
        known = {*COUNTED_IN_ROUNDS, *(name for options in methods for name, value in options.items() if type(value) is int)}
        for path in self.own.get("scaled", ()) if methods else ():
            if path not in known:
                raise unknown("setting in scaled:", path, known)

    def _library_settings(self) -> set[str]:
        return {p for c in self.paper.get("columns", {}).values() for p in flatten_settings(c.get("run", {}).get("settings", {}))}


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Later values win; settings of methods are put together."""
    settings = {**flatten_settings(old.get("settings", {})), **flatten_settings(new.get("settings", {}))}
    return {**old, **new, **({"settings": settings} if settings or "settings" in new else {})}


def _check_round(score: Score, values: Mapping[str, Any] | None) -> None:
    """A round to score that the run never comes to would leave the cell without a value, after all the training."""
    rounds = int((values or {}).get("rounds", DEFAULT_ROUNDS))
    if values is not None and isinstance(score.select, int) and score.select > rounds:
        raise ConfigError(f"it is scored in round {score.select}, and its run has {rounds} rounds.")


def _seeds(given: Any) -> tuple[int, ...]:
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_SEEDS:
        return tuple(range(given))
    if isinstance(given, list) and given and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in given):
        return tuple(dict.fromkeys(given))
    raise ConfigError(f"seeds must be a number from 1 up to {MOST_SEEDS}, or a list of seeds. Got {given!r} instead.")


__all__ = ["load_recipe", "recipe_names", "recipes_folder"]
