"""Run a recipe: every cell and seed is a run folder of its own, so that it goes on where it was, here or on another machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.directory import VARIABLE, data_directory
from ..errors import ConfigError, ConsilienceError
from ..runs.config import RunConfig
from ..runs.many import Job, Watcher, run_many
from .check import missing_data
from .folders import RUNS, cell_values, drop_measures, known_measures, run_folder, scaled_rounds, stored_run, take_measures
from .format import Cell, Recipe, Score
from .outcome import Entry, Outcome
from .score import value_in, value_of

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What is asked of a recipe."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: int | None = None                    # how many, from the recipe's first; None: the recipe's own
    scale: float = 1.0                          # of the rounds
    engine: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 100:
            raise ConfigError(f"The rounds' scale must be above 0 and at most 100. Got {self.scale!r} instead.")
        if self.seeds is not None and self.seeds < 1:
            raise ConfigError(f"The number of seeds must be at least 1. Got {self.seeds} instead.")

    def seeds_of(self, recipe: Recipe) -> list[int]:
        known = list(recipe.seeds)
        count = self.seeds or len(known)
        return (known + list(range(max(known) + 1, max(known) + 1 + count)))[:count]

    def command(self, recipe: Recipe) -> str:
        """As it can be typed, without this machine's places."""
        words = ["consilience", "reproduce", recipe.name]
        words += ["--rows", ",".join(self.rows)] if self.rows else []
        words += ["--columns", ",".join(self.columns)] if self.columns else []
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        words += ["--rounds-scale", f"{self.scale:g}"] if self.scale != 1.0 else []
        words += ["--engine", self.engine] if self.engine else []
        words += ["--device", self.device] if self.device else []
        return shlex.join(words)


@contextlib.contextmanager
def data_in(directory: str | Path | None) -> Iterator[None]:
    """Look for data there. By the environment, so that no run's folder holds a path of this machine."""
    if directory is None:
        yield
        return
    chosen = data_directory(directory).resolve()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(chosen)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def reproduce(recipe: Recipe, out: str | Path, order: Order | None = None, *, data_dir: str | Path | None = None, jobs: int | None = None,
              again: bool = False, train: bool = True, runs: str | Path | None = None, watcher: Watcher | None = None,
              tell: Tell = lambda what: None) -> Outcome:
    """Run what is asked for and is not there yet, score it, and return paper / ours / difference for the whole recipe.

    Cells outside of `order` are reported from what earlier commands have left. Without `train` nothing is run or measured.
    `runs` is the folder of the run folders, by default `out`/runs; recipes that share one share the runs they have in common.
    """
    place = Path(runs) if runs is not None else Path(out) / RUNS
    order = order or Order()
    wanted = recipe.select(order.rows, order.columns)
    with data_in(data_dir):
        if recipe.untrained:
            return Outcome(recipe, [], order.scale, order.seeds_of(recipe), order.command(recipe))
        failures: dict[str, str] = {}
        if train:
            failures = _train(recipe, place, order, wanted, jobs, again, watcher)
            _measure(recipe, place, order, wanted, failures, tell)
        return collect(recipe, place, order, failures)


def _runs(recipe: Recipe, place: Path, order: Order, cell: Cell, seeds: Sequence[int]) -> Iterator[tuple[int, dict[str, Any], Path]]:
    for seed in seeds:
        values = cell_values(cell, seed, scale=order.scale, scaled=recipe.scaled, engine=order.engine, device=order.device)
        yield seed, values, run_folder(place, values)


def obstacle(cell: Cell) -> str | None:
    """Why a cell cannot be had, by the recipe or for want of data."""
    return cell.unavailable or (missing_data(cell.values) if cell.values is not None else None)


def _train(recipe: Recipe, place: Path, order: Order, wanted: Sequence[Cell], jobs: int | None, again: bool,
           watcher: Watcher | None) -> dict[str, str]:
    """Run what is not finished; returns failures by folder. Seeds go first, so that one of everything is there early."""
    work: dict[Path, Job] = {}
    for seed in order.seeds_of(recipe):
        for cell in wanted:
            if obstacle(cell):
                continue
            for _, values, folder in _runs(recipe, place, order, cell, [seed]):
                done = not again and (folder / "done").is_file() and stored_run(folder, values) is not None
                if folder not in work and not done:
                    work[folder] = Job(f"{cell.row.title}, {cell.column.title}, seed {seed}", RunConfig.make(values), str(folder))
    for folder in work if again else ():
        drop_measures(folder)
    if not work:
        return {}
    outcomes = run_many(list(work.values()), f"reproducing {recipe.name}", workers=jobs, again=again, watcher=watcher)
    return {folder.name: o for folder, o in zip(work, outcomes) if isinstance(o, str)}


def _measure(recipe: Recipe, place: Path, order: Order, wanted: Sequence[Cell], failures: dict[str, str], tell: Tell) -> None:
    """Measures of finished runs that some cell is scored by. A run that cannot be measured is a failure of its cells."""
    needed: dict[Path, list[str]] = {}
    for cell in wanted:
        texts = [s.measure for s in (cell.score, *(s for _, s in cell.also)) if s.measure]
        if recipe.drawings:
            texts += [d.measure for d in recipe.drawings if d.measure]
        if texts and not obstacle(cell):
            for _, _, folder in _runs(recipe, place, order, cell, order.seeds_of(recipe)):
                if (folder / "done").is_file():
                    needed.setdefault(folder, []).extend(texts)
    for folder, texts in needed.items():
        try:
            take_measures(folder, texts, None, lambda text, folder=folder: tell(f"{text} of {folder.name}"))
        except ConsilienceError as error:
            failures[folder.name] = str(error)


def collect(recipe: Recipe, place: Path, order: Order, failures: dict[str, str] | None = None) -> Outcome:
    """Every cell of the recipe with what lies in the folder of runs."""
    failures = failures or {}
    asked = order.seeds_of(recipe)
    entries = []
    for cell in recipe.cells:
        why = obstacle(cell)
        full = cell.rounds if cell.values is not None else 0
        entry = Entry(cell, scaled_rounds(full, order.scale) if full else 0, full, unavailable=why)
        seeds = sorted({*asked, *recipe.seeds}) if cell.values is not None else []
        for seed, values, folder in _runs(recipe, place, order, cell, seeds):
            _fill(entry, seed, values, folder, asked, failures, order.scale)
        entries.append(entry)
    return Outcome(recipe, entries, order.scale, asked, order.command(recipe))


def _fill(entry: Entry, seed: int, values: dict[str, Any], folder: Path, asked: Sequence[int], failures: dict[str, str],
          scale: float) -> None:
    try:
        run = stored_run(folder, values)
    except ConsilienceError as error:
        entry.states[seed] = f"failed: {error}"
        return
    if folder.name in failures:
        entry.states[seed] = f"failed: {failures[folder.name]}"
    elif run is None or run.stopped is None:
        last = run.records[-1]["round"] if run and run.records else 0
        if run is not None:
            entry.states[seed] = f"round {last} of {values['rounds']}"
            entry.runs[seed] = run
        elif seed in asked:
            entry.states[seed] = "not run"
        return
    if run is None or run.stopped is None:
        return
    entry.runs[seed] = run
    entry.states.setdefault(seed, "done")
    known = known_measures(folder)
    percent = 100.0 if entry.cell.unit == "%" else 1.0

    def number(score: Score) -> float | None:
        if score.measure:
            taken = known.get(score.measure)
            value = value_in(taken["result"], score.value or "", score.measure) if taken else None
            return None if value is None else score.factor * value
        if isinstance(score.select, int) and scale != 1.0:
            score = dataclasses.replace(score, select=scaled_rounds(score.select, scale))
        return value_of(score, run.records)

    try:
        value = number(entry.cell.score)
        if value is not None:
            entry.values[seed] = percent * value
        for title, score in entry.cell.also:
            if (other := number(score)) is not None:
                entry.also.setdefault(title, {})[seed] = percent * other
    except ConsilienceError as error:
        entry.states[seed] = f"failed: {error}"

