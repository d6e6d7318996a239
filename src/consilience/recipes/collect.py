"""Every cell of a recipe with what lies in the folder of runs: values by the protocol, and why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConsilienceError
from ..report.gather import StoredRun
from .check import missing_data
from .folders import cell_values, known_measures, run_folder, stored_run
from .format import Cell, Recipe, Score, scaled_rounds
from .orders import Order
from .outcome import NEVER, Entry, Outcome
from .score import value_in, value_of


def runs_of(recipe: Recipe, place: Path, order: Order, cell: Cell, seeds: Sequence[int]) -> Iterator[tuple[int, dict[str, Any], Path]]:
    """The runs of a cell, by seed. A mean of other columns has none of its own."""
    for seed in seeds if cell.values is not None else ():
        values = cell_values(cell, seed, scale=order.scale, scaled=recipe.scaled, engine=order.engine, device=order.device,
                             changed=order.changed)
        yield seed, values, run_folder(place, values)


def obstacle(cell: Cell) -> str | None:
    """Why a cell cannot be had, by the recipe or for want of data."""
    return cell.unavailable or (missing_data(cell.values) if cell.values is not None else None)


def obstacles(recipe: Recipe) -> list[str | None]:
    """Why each cell of a recipe cannot be had, in their order. A mean of columns lacks what any of them lacks."""
    own = {(c.row.name, c.column.name): obstacle(c) for c in recipe.cells}
    return [next((why for name in (c.column.name, *c.column.mean_of, *c.column.minus) if (why := own.get((c.row.name, name)))), None)
            for c in recipe.cells]


class Failures(dict[str, str]):
    """Why runs failed, by their folders' names; and why measures of runs did, which the runs themselves outlive."""

    def __init__(self) -> None:
        super().__init__()
        self.measures: dict[tuple[str, str], str] = {}            # by folder's name and measure


def collect(recipe: Recipe, place: Path, order: Order, failures: Failures | None = None) -> Outcome:
    """Every cell of the recipe with what lies in the folder of runs."""
    return _Collection(recipe, place, order, Failures() if failures is None else failures).outcome()


class _Collection:
    def __init__(self, recipe: Recipe, place: Path, order: Order, failures: Failures) -> None:
        self.recipe, self.place, self.order, self.failures = recipe, place, order, failures
        self.asked = order.seeds_of(recipe)
        self.cells = {(c.row.name, c.column.name): c for c in recipe.cells}

    def outcome(self) -> Outcome:
        entries = {}
        for name, cell in self.cells.items():
            full = cell.rounds if cell.values is not None else 0
            run = scaled_rounds(full, self.order.scale) if full else 0
            entry = Entry(cell, run, full, unavailable=obstacle(cell), scale=self.order.scale)
            for seed, values, folder in runs_of(self.recipe, self.place, self.order, cell, sorted({*self.asked, *self.recipe.seeds})):
                self.fill(entry, seed, values, folder)
            entries[name] = entry
        for (row, _), entry in entries.items():
            column = entry.cell.column
            if column.mean_of and not entry.cell.unavailable:
                self.average(entry, *([entries[row, name] for name in names] for names in (column.mean_of, column.minus)))
        return Outcome(self.recipe, list(entries.values()), self.order.scale, self.asked, self.order.command(self.recipe),
                       changed=self.order.changed)

    def fill(self, entry: Entry, seed: int, values: dict[str, Any], folder: Path) -> None:
        try:
            run = stored_run(folder, values)
        except ConsilienceError as error:
            entry.states[seed] = f"failed: {error}"
            return
        if run is None:
            if folder.name in self.failures:
                entry.states[seed] = f"failed: {self.failures[folder.name]}"
            elif seed in self.asked:
                entry.states[seed] = "not run"
            return
        entry.unavailable = None                       # it was run where the data are
        entry.runs[seed] = run
        last = run.records[-1]["round"] if run.records else 0
        entry.states[seed] = f"round {last} of {values['rounds']}" if run.stopped is None else "done"
        try:
            value = self.number(entry.cell, entry.cell.score, seed, run)
            if value is None and run.stopped is not None:
                self.say_why_none(entry, seed, run)
            elif value is not None and (run.stopped is not None or entry.cell.score.settled):
                entry.values[seed], entry.states[seed] = value, "done"
            elif value is not None:
                entry.partial[seed] = value
            if folder.name in self.failures:
                entry.states[seed] = f"failed: {self.failures[folder.name]}"
            for title, score in entry.cell.also if run.stopped is not None else ():
                if (other := self.number(entry.cell, score, seed, run)) is not None:
                    entry.also.setdefault(title, {})[seed] = other
        except ConsilienceError as error:
            entry.states[seed] = f"failed: {error}"

    def say_why_none(self, entry: Entry, seed: int, run: StoredRun) -> None:
        """Why a finished run has no value: its threshold was not reached, or it lacks the measure that its cell is scored by."""
        score = entry.cell.score
        asked = score.reach is not None or (score.reach_row is not None and self.threshold(entry.cell, score, seed) is not None)
        last = dataclasses.replace(score, reach=None, reach_row=None, select="last", report="value")
        if asked and value_of(last, run.records) is not None:
            rounds = run.records[-1]["round"]
            entry.states[seed] = f"{NEVER} {rounds} round{'' if rounds == 1 else 's'}"
        text = score.measure
        if text and text not in known_measures(run.path):
            why = self.failures.measures.get((run.path.name, text))
            entry.states[seed] = f"failed: {why}" if why else "not measured"

    def number(self, cell: Cell, score: Score, seed: int, run: StoredRun) -> float | None:
        """The value of a run by a protocol, in the table's unit."""
        percent = 100.0 if cell.unit == "%" else 1.0
        if score.measure:
            taken = known_measures(run.path).get(score.measure)
            value = value_in(taken["result"], score.value or "", score.measure) if taken else None
            return None if value is None else percent * score.factor * value
        score = score.shrunk(self.order.scale)
        if score.reach_row is not None:
            threshold = self.threshold(cell, score, seed)
            if threshold is None:
                return None
            score = dataclasses.replace(score, reach_row=None, reach=threshold)
        value = value_of(score, run.records)
        return None if value is None else percent * value

    def threshold(self, cell: Cell, score: Score, seed: int) -> float | None:
        """What the row named by the score has in this column, by the same protocol. None while its run is not finished."""
        other = self.cells[score.reach_row or "", cell.column.name]
        for _, values, folder in runs_of(self.recipe, self.place, self.order, other, [seed]):
            run = stored_run(folder, values)
            if run is not None and run.stopped is not None:
                return value_of(dataclasses.replace(score, reach_row=None, report="value"), run.records)
        return None

    def average(self, entry: Entry, plus: Sequence[Entry], minus: Sequence[Entry]) -> None:
        """The mean over some columns, less the mean over others, for seeds that all of them have."""
        parts = [*plus, *minus]
        entry.rounds, entry.full_rounds = parts[0].rounds, parts[0].full_rounds
        entry.unavailable = next((p.unavailable for p in parts if p.unavailable), None)
        for seed in sorted({s for p in parts for s in p.states}):
            if all(seed in p.values for p in parts):
                mean = lambda own, seed=seed: sum(p.values[seed] for p in own) / len(own) if own else 0.0
                entry.values[seed] = mean(plus) - mean(minus)
                entry.states[seed] = "done"
            else:
                entry.states[seed] = next(p.states.get(seed, "not run") for p in parts if seed not in p.values)
