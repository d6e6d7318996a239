"""Run recipes: every cell and seed is a run folder of its own, so that it goes on where it was, here or on another machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.directory import VARIABLE, data_directory
from ..runs.config import RunConfig
from ..runs.listener import Watcher
from ..runs.many import LATE, Job, run_many
from .collect import Failures, collect, obstacle, runs_of
from .folders import RUNS, drop_measures, known_measures, settle_machine, stored_run
from .format import Cell, Recipe
from .measuring import TakeMeasures, missing_measures
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

    Measures that cells are scored by are taken of a run as soon as it has ended, in the process that ran it. Finished runs that lack some
    come first: what is needed for them may not be there another time.
    """
    with data_in(data_dir):
        failures = Failures()
        if train:
            _train(pieces, jobs, again, until, watcher or Watcher(), tell, finished, failures)
        return [Outcome(p.recipe, [], p.order.scale, p.order.seeds_of(p.recipe), p.order.command(p.recipe)) if p.recipe.untrained
                else collect(p.recipe, p.runs, p.order, failures) for p in pieces]


# ---- training --------------------------------------------------------------------------------------------------------

class _Reporter(Watcher):
    """Hands everything on, and tells how a recipe stands when one of its runs has ended."""

    def __init__(self, watcher: Watcher, owners: dict[str, list[tuple[Piece, Cell, int, str]]], tell: Tell, finished: Finished) -> None:
        self.watcher, self.owners, self.tell, self.finished = watcher, owners, tell, finished
        self.begin, self.rounds_done, self.rounds_found = watcher.begin, watcher.rounds_done, watcher.rounds_found  # type: ignore[method-assign]
        self.noted, self.warned = watcher.noted, watcher.warned  # type: ignore[method-assign]

    def run_done(self, label: str, failure: str | None) -> None:
        self.watcher.run_done(label, failure)
        if failure:
            self.tell(f"{label}: {failure}")
        told: set[int] = set()
        for piece, cell, seed, name in self.owners.get(label, ()):
            outcome = collect(piece.recipe, piece.runs, piece.order)
            entry = next(e for e in outcome.entries if e.cell is cell)
            if not failure:
                self.tell(f"{name}: {entry.line(seed)}{outcome.brief}")
            if id(piece) not in told:
                told.add(id(piece))
                self.finished(piece, outcome)


def _train(pieces: Sequence[Piece], jobs: int | None, again: bool, until: float | None, watcher: Watcher, tell: Tell,
           finished: Finished, failures: Failures) -> None:
    """Run what is not finished, and take the measures that are missing."""
    work: dict[Path, Job] = {}
    owners: dict[str, list[tuple[Piece, Cell, int, str]]] = {}         # by the label of a run: the cells it serves, and their names
    measures = _measures_by_folder(pieces)
    allowed = 0.0 if until is None else max(0.0, until - time.time())
    for turn in range(max((len(p.order.seeds_of(p.recipe)) for p in pieces), default=0)):
        for piece in pieces:
            seeds = [] if piece.recipe.untrained else piece.order.seeds_of(piece.recipe)[turn: turn + 1]
            for cell in piece.order.cells_of(piece.recipe):
                if obstacle(cell):
                    continue
                for seed, values, folder in runs_of(piece.recipe, piece.runs, piece.order, cell, seeds):
                    prefix = f"{piece.recipe.name}, " if len(pieces) > 1 else ""
                    name = f"{prefix}{cell.row.title}, {cell.column.title}, seed {seed}"
                    if folder not in work:
                        ran = not again and _is_there(folder, values, cell)
                        due = measures[folder] if again else missing_measures(folder, measures[folder])
                        if ran and not (due and (folder / "done").is_file()):
                            continue
                        values = values if again else settle_machine(folder, values)
                        config = RunConfig.make({**values, "checkpoint_seconds": CHECKPOINT_SECONDS})
                        work[folder] = Job(name, config, str(folder), TakeMeasures(due, allowed) if due else None, ran)
                    owners.setdefault(work[folder].label, []).append((piece, cell, seed, name))
    for folder in work if again else ():
        drop_measures(folder)
    if work:
        what = f"reproducing {', '.join(dict.fromkeys(p.recipe.name for p in pieces))}"
        work = dict(sorted(work.items(), key=lambda item: not item[1].ran))
        outcomes = run_many(list(work.values()), what, workers=jobs, again=again, until=until,
                            watcher=_Reporter(watcher, owners, tell, finished))
        for folder, o in zip(work, outcomes):
            if isinstance(o, str):
                failures.update({folder.name: o} if o != LATE else {})
            else:
                failures.measures.update({(folder.name, text): why for text, why in (o.get("then") or {}).items()})


def _measures_by_folder(pieces: Sequence[Piece]) -> dict[Path, tuple[str, ...]]:
    """The measures of every run that a cell asked for is scored by, or that a picture shows."""
    out: dict[Path, tuple[str, ...]] = {}
    for piece in pieces:
        drawn = tuple(d.measure for d in piece.recipe.drawings if d.measure)
        for cell in [] if piece.recipe.untrained else piece.order.cells_of(piece.recipe):
            for _, _, folder in runs_of(piece.recipe, piece.runs, piece.order, cell, piece.order.seeds_of(piece.recipe)):
                out[folder] = tuple(dict.fromkeys((*out.get(folder, ()), *_measures_of(cell), *drawn)))
    return out


def _is_there(folder: Path, values: dict[str, Any], cell: Cell) -> bool:
    """Finished, or kept as the records of a finished run, where these say all that the cell is scored by."""
    if (folder / "config.json").is_file():
        return (folder / "done").is_file() and stored_run(folder, values) is not None
    kept = stored_run(folder, values)
    return kept is not None and kept.stopped is not None and set(_measures_of(cell)) <= known_measures(kept.path).keys()


def _measures_of(cell: Cell) -> list[str]:
    return [s.measure for s in (cell.score, *(s for _, s in cell.also)) if s.measure]


__all__ = ["Order", "Piece", "data_in", "obstacle", "reproduce", "reproduce_all"]
