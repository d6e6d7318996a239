"""Paper, ours and difference, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ..report.gather import StoredRun
from ..report.tables import Table
from ..runs.statistics import Spread, spread
from .format import Cell, Recipe

HEADER = ["column", "row", "paper", "ours", "difference", "within the paper's spread", "seeds", "rounds"]
NEVER = "not reached in"                       # the state of a run that ended before its threshold
LABEL_END = ", so these are not the table's numbers"
# settings of a run that say how its numbers are computed and kept, not which
HOW = frozenset({"layout", "eval_batch", "engine", "device", "devices", "ray", "store", "map_data", "data_dir", "track",
                 "checkpoint_seconds"})


@dataclass
class Entry:
    """A cell and what its runs gave. Values are in the table's unit."""

    cell: Cell
    rounds: int                                                   # as run; the recipe's own are in full_rounds
    full_rounds: int
    values: dict[int, float] = field(default_factory=dict)        # by seed, of finished runs
    partial: dict[int, float] = field(default_factory=dict)       # by seed, of runs that were cut off, by the same protocol
    also: dict[str, dict[int, float]] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)          # by seed: done, not run, round 3 of 20, not reached in …, failed: …
    runs: dict[int, StoredRun] = field(default_factory=dict)
    unavailable: str | None = None
    scale: float = 1.0

    @property
    def protocol(self) -> str:
        """How its number was taken, in words: of the rounds that were run."""
        return self.cell.score.shrunk(self.scale).sentence()

    def line(self, seed: int) -> str:
        """How one run stands, in a line."""
        digits, printed = self.cell.digits, self.cell.printed
        value = self.values.get(seed, self.partial.get(seed))
        state = self.states.get(seed, "done")
        never = state.startswith(NEVER)
        shown = state if never else "no value yet" if value is None else f"{value:.{digits}f}"
        paper = f", paper {printed.shown(digits)}" if printed is not None else ""
        seconds = sum((r.get("measured") or {}).get("seconds", 0.0) for r in self.runs[seed].records) if seed in self.runs else 0.0
        cut = f", {state}" if state != "done" and not never else ""
        return f"{shown}{paper}{cut}, {seconds:.0f} s"

    @property
    def ours(self) -> Spread | None:
        return spread(list(self.values.values()))

    @property
    def difference(self) -> float | None:
        printed = self.cell.printed
        return None if self.ours is None or printed is None or printed.value is None else self.ours.mean - printed.value

    @property
    def within(self) -> bool | None:
        """Whether our mean lies within the paper's spread; None where the paper prints none."""
        printed = self.cell.printed
        if self.difference is None or printed is None or printed.spread is None:
            return None
        return abs(self.difference) <= printed.spread + 1e-9      # 69.7 is within 69.1 ± 0.6 in spite of binary fractions

    @property
    def came_out(self) -> bool:
        """Whether its runs say something: a number, or that a threshold was not reached."""
        return bool(self.values or self.partial) or any(s.startswith(NEVER) for s in self.states.values())

    @property
    def state(self) -> str:
        """One word or two for the table: why there is no value, or how many seeds it has."""
        if self.unavailable:
            return "unavailable"
        words = [s for s in self.states.values() if s != "done"]
        if words and all(w == "not run" for w in words):
            return "not run"
        return next((w.partition(":")[0] for w in words if w != "not run"), "no value" if not self.values else "")


@dataclass
class Outcome:
    """What a reproduction has so far."""

    recipe: Recipe
    entries: list[Entry]
    scale: float
    seeds: Sequence[int]                                          # asked for
    command: str = ""
    figures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    changed: Sequence[tuple[str, str]] = ()

    @property
    def label(self) -> str:
        """Stands in every output when the rounds or settings are not the recipe's."""
        way = "DOWN" if self.scale < 1 else "UP"
        scaled = f"SCALED {way}: rounds x{self.scale:g} of the recipe's" if self.scale != 1.0 else ""
        changed = _settings("CHANGED: ", self.other)
        both = "; ".join(filter(None, (scaled, changed)))
        return both + LABEL_END if both else ""

    @property
    def brief(self) -> str:
        """The label in a few words, for a line in a log."""
        scaled = f"scaled x{self.scale:g}" if self.scale != 1.0 else ""
        words = ", ".join(filter(None, (scaled, _settings("", self.other))))
        return f" [{words}]" if words else ""

    @property
    def other(self) -> list[tuple[str, str]]:
        """Settings that are not the recipe's and decide what is computed."""
        return [(name, value) for name, value in self.changed if name not in HOW]

    def table(self, rows: Sequence[str] = (), columns: Sequence[str] = (), cells: Sequence[Cell] | None = None) -> Table:
        """Paper / ours / difference of some rows and columns, or of single cells, column by column."""
        chosen = [e for c in self.recipe.columns for e in self.entries if e.cell.column.name == c.name
                  and (not columns or c.name in columns) and (not rows or e.cell.row.name in rows)
                  and (cells is None or any(e.cell is cell for cell in cells))]
        extra = list(dict.fromkeys(title for e in chosen for title, _ in e.cell.also))
        title = f"{self.recipe.name}: {self.recipe.title}" + (f" [{self.label}]" if self.label else "")
        lines, records = [self._cells(e, extra) for e in chosen], [self.record(e) for e in chosen]
        return Table([*HEADER, *extra], lines, title, self.notes(chosen), records, [self._numbers(e, extra) for e in chosen])

    def _cells(self, e: Entry, extra: Sequence[str]) -> list[str]:
        digits, printed = e.cell.digits, e.cell.printed
        ours = e.ours
        without = f" ({lacking})" if (lacking := _lacking(e.states)) else ""
        so_far = spread(list(e.partial.values()))
        shown = (ours.text(digits) + without) if ours else f"{so_far.text(digits)} at {e.state}" if so_far else e.state
        within = {True: "yes", False: "no", None: "–"}[e.within]
        paper = "ours" if e.cell.ours else "–" if printed is None else printed.shown(digits)
        more = [s.text(digits) if (s := spread(list(e.also.get(t, {}).values()))) else "–" for t in extra]
        rounds = self._rounds(e) or "–"
        difference = "–" if e.difference is None else f"{e.difference:+.{digits}f}"
        seeds = str(len(e.values)) if e.values else "–"
        return [e.cell.column.title, e.cell.row.title, paper, shown, difference, within, seeds, rounds, *more]

    def _rounds(self, e: Entry) -> str | None:
        if not e.full_rounds:
            return None
        return f"{e.rounds} of {e.full_rounds} (scaled x{self.scale:g})" if self.scale != 1.0 else str(e.rounds)

    def _numbers(self, e: Entry, extra: Sequence[str]) -> dict[str, Any]:
        """A row with one number a cell: spreads, scores of runs that were cut off and why there is no value have cells of their own."""
        printed, ours, so_far = e.cell.printed, e.ours, spread(list(e.partial.values()))
        also = {t: s.mean if (s := spread(list(e.also.get(t, {}).values()))) else None for t in extra}
        within = {True: "yes", False: "no", None: None}[e.within]
        values = [e.cell.column.title, e.cell.row.title, printed and printed.value, ours and ours.mean, e.difference, within,
                  len(e.values), self._rounds(e)]
        changed = {"changed": _settings("", self.other)} if self.other else {}
        more = {"spread in the paper": printed and printed.spread, "std of ours": ours and ours.std, "so far": so_far and so_far.mean,
                "state": e.state or "done"}
        return dict(zip(HEADER, values)) | changed | also | more

    def record(self, e: Entry) -> dict[str, Any]:
        """A cell for JSON."""
        printed, ours = e.cell.printed, e.ours
        return {"recipe": self.recipe.name, "row": e.cell.row.name, "column": e.cell.column.name, "row_title": e.cell.row.title,
                "column_title": e.cell.column.title, "unit": e.cell.unit,
                "paper": None if printed is None else {"value": printed.value, "spread": printed.spread, "printed": printed.text,
                                                       "readable": not printed.unreadable},
                "ours": None if ours is None else {"mean": ours.mean, "std": ours.std, "values": {str(k): v for k, v in e.values.items()}},
                "cut_off": {str(k): v for k, v in e.partial.items()}, "difference": e.difference, "within_paper_spread": e.within,
                "also": {t: {str(k): v for k, v in each.items()} for t, each in e.also.items()},
                "states": {str(k): s for k, s in e.states.items()}, "unavailable": e.unavailable, "not_in_paper": e.cell.ours,
                "method": e.cell.method, "protocol": e.protocol, "rounds": e.rounds, "recipe_rounds": e.full_rounds,
                "scaled": None if self.scale == 1.0 else self.scale, "changed": dict(self.changed), "note": e.cell.note,
                "folders": {str(k): f"runs/{r.path.name.removesuffix('.csv')}" for k, r in e.runs.items()}}

    def notes(self, chosen: Sequence[Entry]) -> list[str]:
        out = [self.label + "."] if self.label else []
        how = _settings("Computed with ", [(name, value) for name, value in self.changed if name in HOW])
        out += [f"{how}: not what is computed but how, so sums may run in another order."] if how else []
        units = {e.cell.unit for e in chosen}
        out.append(("Values in %; " if units == {"%"} else "Values in % where the paper has them so; " if "%" in units else "")
                   + "ours: mean ± standard deviation over seeds; difference: ours − paper. \"ours\" under paper: not in the paper.")
        protocols = dict.fromkeys(e.protocol for e in chosen if not e.unavailable)
        if len(protocols) == 1:
            out.append(f"Scored: {next(iter(protocols))}.")
        for text in protocols if 1 < len(protocols) <= 6 else ():
            where = sorted({e.cell.row.title if len({x.protocol for x in chosen if x.cell.row is e.cell.row}) == 1
                            else e.cell.column.title for e in chosen if e.protocol == text and not e.unavailable})
            out.append(f"Scored, {', '.join(where)}: {text}.")
        for reason, entries in grouped(chosen).items():
            out.append(f"Unavailable, {', '.join(entries)}: {reason}.")
        return out + [f"{what}." for what in self.order(chosen)] + self.remarks

    def order(self, chosen: Sequence[Entry]) -> list[str]:
        """How many pairs of rows stand in the paper's order, column by column."""
        out = []
        for column in dict.fromkeys(e.cell.column.name for e in chosen):
            own = [e for e in chosen if e.cell.column.name == column and e.difference is not None]
            pairs = [(a, b) for a, b in combinations(own, 2) if a.cell.printed.value != b.cell.printed.value]  # type: ignore[union-attr]
            if pairs:
                agree = sum((a.cell.printed.value > b.cell.printed.value) == (a.ours.mean > b.ours.mean) for a, b in pairs)  # type: ignore[union-attr, operator]
                out.append(f"Order of rows, {own[0].cell.column.title}: {agree} of {len(pairs)} pairs as in the paper")
        return out

    def document(self) -> dict[str, Any]:
        """One JSON-able document."""
        r = self.recipe
        return {"recipe": r.name, "title": r.title, "paper": r.citation, "scaled": None if self.scale == 1.0 else self.scale,
                "changed": dict(self.changed), "label": self.label, "command": self.command, "seeds": list(self.seeds),
                "recipe_seeds": list(r.seeds),
                "readings": list(r.readings), "notes": list(r.notes), "cells": [self.record(e) for e in self.entries],
                "order": self.order(self.entries), "figures": list(self.figures), "remarks": list(self.remarks),
                "unavailable": r.unavailable}


def _lacking(states: dict[int, str]) -> str:
    """The seeds that ran and have no value, by why: `seeds 0, 2: not measured, seed 3: failed`."""
    by_reason: dict[str, list[str]] = {}
    for seed, word in states.items():
        if word not in ("done", "not run"):
            by_reason.setdefault(word.partition(":")[0], []).append(str(seed))
    return ", ".join(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {reason}" for reason, seeds in by_reason.items())


def _settings(title: str, given: Sequence[tuple[str, str]]) -> str:
    return title + ", ".join(f"{name}={value}" for name, value in given) if given else ""


def grouped(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Reasons and the rows or columns they hold for, short: a whole row or column by its name."""
    reasons: dict[str, list[Entry]] = {}
    for e in entries:
        if e.unavailable:
            reasons.setdefault(e.unavailable, []).append(e)
    out: dict[str, list[str]] = {}
    for reason, own in reasons.items():
        rows, columns = ({getattr(e.cell, kind).title for e in own} for kind in ("row", "column"))
        out[reason] = sorted(rows if len(rows) <= len(columns) else columns)
    return out
