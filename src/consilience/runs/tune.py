"""The same search budget for every method, by validation on a seed that is not compared. Test scores are never read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import rng
from ..errors import ConfigError
from ..metrics.criterion import ACCURACY, validation_score
from ..parts.presets import PRESETS
from ..parts.stack import parse_stack, split_tokens
from ..report.tables import Table
from .config import RunConfig
from .entries import Entry
from .many import Job, folder_in, run_many
from .run import load_data
from .watcher import Watcher

LEARNING_RATES = {"sgd": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
                  "adam": (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)}
VALIDATION = 0.1
APART = 1_000_000           # the search's seed lies this far above the first compared one, however many there are


@dataclass(frozen=True)
class Dimension:
    """One setting of a search. A preset's option may set several parts' options at once."""

    name: str
    targets: tuple[str, ...]
    values: tuple[Any, ...]


def space_of(entry: Entry, base: RunConfig, learning_rates: Sequence[float] | None = None) -> tuple[Dimension, ...]:
    """The learning rate and the declared ranges of the method's parts. What was given for the row stays as it was given."""
    lrs = tuple(learning_rates or LEARNING_RATES[entry.values.get("optimiser", base.policy.optimiser)])
    out = [] if "lr" in entry.values else [Dimension("lr", ("lr",), lrs)]
    parts = parse_stack(entry.method, entry.settings).parts
    names, typed = {p.name for p in parts}, split_tokens(entry.method)
    fixed = {*entry.settings, *(f"{part}.{option}" for name in typed if name in PRESETS
                                for part, options in PRESETS[name].settings.items() for option in options)}
    whole = [p for p in PRESETS.values() if p.parts and names.issuperset(p.parts)]
    for part in parts:
        for f in dataclasses.fields(part):  # type: ignore[arg-type]
            path = f"{part.name}.{f.name}"
            # LfD's temperature belongs to its head and to its labels: what one option of a preset sets together moves together
            name, tied = next(((f"{p.name}.{o}", t) for p in whole for o, t in p.options.items() if path in t and len(t) > 1),
                              (path, (path,)))
            if f.metadata.get("tune") and fixed.isdisjoint(tied) and not any(path in d.targets for d in out):
                out.append(Dimension(name, tied, tuple(f.metadata["tune"])))
    return tuple(out)


def draw(space: Sequence[Dimension], count: int, seed: int, method: str,
         allowed: Callable[[dict[str, Any]], bool] = lambda point: True) -> list[dict[str, Any]]:
    """`count` points of the grid without replacement, fewer where there are fewer. A larger count begins with the same ones."""
    order = rng.permutation(rng.key(seed, "tune", method), math.prod(len(d.values) for d in space))
    out: list[dict[str, Any]] = []
    for number in order.tolist():
        point = {}
        for d in space:
            number, digit = divmod(number, len(d.values))
            point[d.name] = d.values[digit]
        if allowed(point):
            out.append(point)
        if len(out) == count:
            break
    return out


def at(entry: Entry, space: Sequence[Dimension], point: dict[str, Any]) -> Entry:
    """The row with a point's settings."""
    chosen = {t: point[d.name] for d in space for t in d.targets}
    settings = {k: v for k, v in chosen.items() if "." in k}
    values = {k: v for k, v in chosen.items() if "." not in k}
    return Entry(entry.name, entry.method, {**entry.settings, **settings}, {**entry.values, **values})


def validation_scores(records: Sequence[dict[str, Any]], score: str) -> tuple[float, float] | None:
    """Validation score and loss by the rule that the table applies to test scores; nothing else of a record is read."""
    judged = [(v, r["validation"]["loss"]) for r in records if r.get("validation") and (v := validation_score(r)) is not None]
    if not judged:
        return None
    ranked = judged[-1:] if score == "last" else sorted(judged, key=lambda v: -v[0])
    used = ranked[: 5 if score == "mean_of_best_five" else 1]
    mean = lambda place: sum(v[place] for v in used) / len(used)
    return mean(0), mean(1)


@dataclass
class Search:
    """One method's search."""

    space: tuple[Dimension, ...]
    trials: list[dict[str, Any]]

    def best(self) -> dict[str, Any] | None:
        """Highest validation accuracy, then lowest validation loss, then the earliest drawn."""
        good = [t for t in self.trials if t["validation"] is not None]
        return max(good, key=lambda t: (t["validation"], -t["loss"], -t["trial"]), default=None)

    def failure(self) -> str | None:
        return None if self.best() else f"no configuration of its search finished; the first: {self.trials[0]['failure']}"


@dataclass
class Tuning:
    """The searches of all rows, under one budget."""

    budget: int
    seed: int
    score: str
    searches: dict[str, Search]
    redrawn: bool = False                           # every seed divides the data anew
    criterion: str = ACCURACY

    def chosen(self, name: str) -> dict[str, Any] | None:
        best = self.searches[name].best()
        return best["settings"] if best else None

    def settled(self, entry: Entry) -> Entry:
        search, point = self.searches[entry.name], self.chosen(entry.name)
        return at(entry, search.space, point) if point is not None else entry

    def notes(self) -> list[str]:
        rule = {"last": "in the last round", "mean_of_best_five": "averaged over its five best rounds"}.get(self.score, "in its best round")
        out = [f"Tuned: {self.budget} configuration{'s' if self.budget > 1 else ''} for every method on seed {self.seed}, which is not "
               f"compared; chosen by validation {self.criterion} {rule}."]
        if self.redrawn:
            out.append("Every seed divides the data anew, so a sample that validated in the search may test in a compared run; data_seed=0 "
                       "keeps them apart.")
        for name, search in self.searches.items():
            if best := search.best():
                out.append(f"Chosen for {name}: {_words(best['settings'])} (validation {best['validation']:.3f}).")
            if len(search.trials) < self.budget:
                out.append(f"{name} has no more than {len(search.trials)} to choose from; all were tried.")
        return out

    def table(self) -> Table:
        rows, data = [], []
        for name, search in self.searches.items():
            for trial in search.trials:
                best = trial is search.best()
                rows.append([name, str(trial["trial"]), _words(trial["settings"]),
                             "failed" if trial["validation"] is None else f"{trial['validation']:.3f}", "chosen" if best else ""])
                data.append({"method": name, **trial, "chosen": best})
        notes = [f"{d['method']}, trial {d['trial']}: {d['failure']}" for d in data if d["failure"]]
        return Table(["method", "trial", "settings", "validation", ""], rows, "The search", notes, data)

    def document(self) -> dict[str, Any]:
        methods = {name: {"space": {d.name: list(d.values) for d in search.space}, "tied": {d.name: list(d.targets) for d in search.space
                          if len(d.targets) > 1}, "chosen": self.chosen(name), "trials": search.trials}
                   for name, search in self.searches.items()}
        return {"budget": self.budget, "seed": self.seed, "score": self.score, "methods": methods}


def tuning_seed(seeds: Sequence[int]) -> int:
    """A seed that no compared run has, and that stays the same when more seeds are added at the end."""
    seed = min(seeds) + APART
    while seed in seeds:
        seed += 1
    return seed


def with_validation(base: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with validation samples, and a remark where it had none."""
    if not base.run.validation:
        about = load_data(base)
        if not len(about.table.val.rows):
            if base.run.split_file or about.description.get("test") == "published":
                raise ConfigError(f"Tuning needs validation samples, but the parts of {about.name!r} are given and have none. "
                                  "Divide it anew with test=clients and validation=0.1.")
            if base.run.validation is not None:
                raise ConfigError("Tuning chooses by validation samples, but validation=0 asks for none. Set validation=0.1 or so, or "
                                  f"leave it out: then {VALIDATION} is taken.")
            if base.run.train is not None and base.run.train + VALIDATION > 1 - 1e-9:
                raise ConfigError(f"Tuning needs validation samples, but train={base.run.train} leaves no room for them. "
                                  "Set train=0.75 and validation=0.1 or so.")
            said = f"Validation: a fraction of {VALIDATION} of every client's samples in all runs, since none was given."
            return base.replace(validation=VALIDATION), [said]
    return base, []


def tune_entries(entries: Sequence[Entry], base: RunConfig, seeds: Sequence[int], budget: int, *, score: str = "last",
                 learning_rates: Sequence[float] | None = None, out: str | Path | None = None, jobs: int | None = None,
                 again: bool = False, watcher: Watcher | None = None, on: str = "here") -> Tuning:
    """Run every method's search, all of them in one go. A finished search run is only read."""
    if budget < 1:
        raise ConfigError(f"Tuning needs at least 1 configuration for every method. Got {budget} instead.")
    seed = tuning_seed(seeds)
    searches: dict[str, Search] = {}
    work: list[Job] = []
    for entry in entries:
        space = space_of(entry, base, learning_rates)
        points = draw(space, budget, seed, entry.method, lambda p, e=entry, s=space: _allowed(at(e, s, p), base, seed))  # type: ignore[misc]
        if not points:
            raise ConfigError(f"No configuration of {entry.name!r} can be run with these settings.")
        searches[entry.name] = Search(space, [{"trial": i, "settings": p} for i, p in enumerate(points)])
        for i, point in enumerate(points):
            config = at(entry, space, point).config(base, seed)
            work.append(Job(f"tuning {entry.name}, {i + 1} of {len(points)}", config, folder_in(out, config)))
    outcomes = iter(run_many(work, "tuning", workers=jobs, again=again, watcher=watcher, on=on))
    for search in searches.values():
        for trial, outcome in zip(search.trials, outcomes):
            found = None if isinstance(outcome, str) else validation_scores(outcome["records"], score)
            trial |= {"validation": found and found[0], "loss": found and found[1],
                      "failure": outcome if isinstance(outcome, str) else None if found else "it has no validation score"}
    return Tuning(budget, seed, score, searches, base.run.data_seed is None and base.run.split_file is None, base.run.criterion)


def _allowed(entry: Entry, base: RunConfig, seed: int) -> bool:
    try:
        entry.config(base, seed)
    except ConfigError:
        return False
    return True


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in settings.items())
