"""Run recipes: every cell and seed is a run folder of its own, so that it goes on where it was, here or on another machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.directory import VARIABLE, data_directory
from ..errors import ConsilienceError
from ..runs.config import RunConfig
from ..runs.many import LATE, Job, Watcher, run_many
from .collect import collect, obstacle, runs_of
from .folders import RUNS, drop_measures, known_measures, settle_machine, stored_run, take_measures
from .format import Cell, Recipe
from .orders import Order, Piece
from .outcome import Outcome

Tell = Callable[[str], None]
Finished = Callable[[Piece, Outcome], object]
CHECKPOINT_SECONDS = 30.0        # a run that is cut off by the clock writes one anyway


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


def reproduce(recipe: Recipe, out: str | Path, order: Order | None = None, *, runs: str | Path | None = None, **more: object) -> Outcome:
    """Run what is asked for and is not there yet, score it, and return paper / ours / difference for the whole recipe.

    Cells outside of `order` are reported from what earlier commands have left. `runs` is the folder of the run folders, by default
    `out`/runs; recipes that share one share the runs they have in common. For the rest see `reproduce_all`.
    """
    place = Path(runs) if runs is not None else Path(out) / RUNS
    return reproduce_all([Piece(recipe, order or Order(), Path(out), place)], **more)[0]  # type: ignore[arg-type]


def reproduce_all(pieces: Sequence[Piece], *, data_dir: str | Path | None = None, jobs: int | None = None, again: bool = False,
                  train: bool = True, until: float | None = None, watcher: Watcher | None = None, tell: Tell = lambda what: None,
                  finished: Finished = lambda piece, outcome: None) -> list[Outcome]:
    """Several recipes in the order given; one seed of everything comes before the second of anything.

    `finished` hears a recipe's outcome whenever one of its runs has ended, so that what is there can be written down. At the time
    `until` (of `time.time`) runs are cut off between two rounds. Without `train` nothing is run or measured.
    """
    with data_in(data_dir):
        failures: dict[str, str] = {}
        if train:
            _train(pieces, jobs, again, until, watcher or Watcher(), tell, finished, failures)
            for piece in pieces:
                _measure(piece, until, failures, tell)
        return [Outcome(p.recipe, [], p.order.scale, p.order.seeds_of(p.recipe), p.order.command(p.recipe)) if p.recipe.untrained
                else collect(p.recipe, p.runs, p.order, failures) for p in pieces]


# ---- training --------------------------------------------------------------------------------------------------------

class _Reporter(Watcher):
    """Hands everything on, and tells how a recipe stands when one of its runs has ended."""

    def __init__(self, watcher: Watcher, owners: dict[str, list[tuple[Piece, Cell, int]]], tell: Tell, finished: Finished) -> None:
        self.watcher, self.owners, self.tell, self.finished = watcher, owners, tell, finished
        self.begin, self.rounds_done, self.warned = watcher.begin, watcher.rounds_done, watcher.warned  # type: ignore[method-assign]

    def run_done(self, label: str, failure: str | None) -> None:
        self.watcher.run_done(label, failure)
        told: set[int] = set()
        for piece, cell, seed in self.owners.get(label, ()):
            outcome = collect(piece.recipe, piece.runs, piece.order)
            entry = next(e for e in outcome.entries if e.cell is cell)
            self.tell(f"{label}: {failure}" if failure else f"{label}: {entry.line(seed)}")
            if id(piece) not in told:
                told.add(id(piece))
                self.finished(piece, outcome)


def _train(pieces: Sequence[Piece], jobs: int | None, again: bool, until: float | None, watcher: Watcher, tell: Tell,
           finished: Finished, failures: dict[str, str]) -> None:
    """Run what is not finished."""
    work: dict[Path, Job] = {}
    owners: dict[str, list[tuple[Piece, Cell, int]]] = {}
    for turn in range(max((len(p.order.seeds_of(p.recipe)) for p in pieces), default=0)):
        for piece in pieces:
            seeds = [] if piece.recipe.untrained else piece.order.seeds_of(piece.recipe)[turn: turn + 1]
            for cell in piece.order.cells_of(piece.recipe):
                if obstacle(cell):
                    continue
                for seed, values, folder in runs_of(piece.recipe, piece.runs, piece.order, cell, seeds):
                    if folder not in work:
                        if not again and _is_there(folder, values, cell):
                            continue
                        values = values if again else settle_machine(folder, values)
                        prefix = f"{piece.recipe.name}, " if len(pieces) > 1 else ""
                        label = f"{prefix}{cell.row.title}, {cell.column.title}, seed {seed}"
                        config = RunConfig.make({**values, "checkpoint_seconds": CHECKPOINT_SECONDS})
                        work[folder] = Job(label, config, str(folder))
                    owners.setdefault(work[folder].label, []).append((piece, cell, seed))
    for folder in work if again else ():
        drop_measures(folder)
    if work:
        what = f"reproducing {', '.join(dict.fromkeys(p.recipe.name for p in pieces))}"
        outcomes = run_many(list(work.values()), what, workers=jobs, again=again, until=until,
                            watcher=_Reporter(watcher, owners, tell, finished))
        failures.update({folder.name: o for folder, o in zip(work, outcomes) if isinstance(o, str) and o != LATE})


def _is_there(folder: Path, values: dict[str, Any], cell: Cell) -> bool:
    """Finished, or kept as the records of a finished run, where these say all that the cell is scored by."""
    if (folder / "config.json").is_file():
        return (folder / "done").is_file() and stored_run(folder, values) is not None
    kept = stored_run(folder, values)
    return kept is not None and kept.stopped is not None and set(_measures_of(cell)) <= known_measures(kept.path).keys()


def _measures_of(cell: Cell) -> list[str]:
    return [s.measure for s in (cell.score, *(s for _, s in cell.also)) if s.measure]


# ---- measures of trained runs ----------------------------------------------------------------------------------------

def _measure(piece: Piece, until: float | None, failures: dict[str, str], tell: Tell) -> None:
    """Measures of finished runs that some cell is scored by. A run that cannot be measured is a failure of its cells."""
    recipe, needed = piece.recipe, dict[Path, list[str]]()
    for cell in [] if recipe.untrained else piece.order.cells_of(recipe):
        texts = _measures_of(cell) + [d.measure for d in recipe.drawings if d.measure]
        if texts and not obstacle(cell):
            for _, _, folder in runs_of(recipe, piece.runs, piece.order, cell, piece.order.seeds_of(recipe)):
                if (folder / "done").is_file():
                    needed.setdefault(folder, []).extend(texts)
    for folder, texts in needed.items():
        if until is not None and time.time() >= until:
            return
        try:
            take_measures(folder, texts, None, lambda text, folder=folder: tell(f"{text} of {folder.name}"))
        except ConsilienceError as error:
            failures[folder.name] = str(error)


__all__ = ["Order", "Piece", "data_in", "obstacle", "reproduce", "reproduce_all"]
