"""Read runs from their folders and put those together that differ by seed alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConsilienceError, DataError
from ..parts.stack import parse_stack
from ..runs.files import read_json
from ..runs.folder import read_records
from ..runs.result import summarise
from ..runs.tune import APART

# Differ between runs whose results may be put into one band: the seeds, and settings that say where and how a run is
# carried out but not what it computes. The layout is among them: machines choose it, each for itself.
_NOT_A_METHOD = frozenset({"method", "settings", "seed", "data_seed", "engine", "device", "layout", "data_dir", "track"})


@dataclass(frozen=True)
class StoredRun:
    """What a run's folder says, read without its data set or its tensors."""

    path: Path
    method: str                              # as it was typed
    config: dict[str, Any]
    about: dict[str, Any]                    # what the run knew of its data
    records: list[dict[str, Any]]
    environment: dict[str, Any]
    measures: dict[str, Any]                 # of measures.json, where there is one
    stopped: str | None                      # why it ended; None while it is not finished

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def scored(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r.get("personalised")]

    def summary(self) -> dict[str, Any]:
        return summarise(self.records, self.stopped or "not finished")


@dataclass(frozen=True)
class Group:
    """Runs of one method with one set of settings, in the order of their seeds."""

    label: str
    runs: tuple[StoredRun, ...]

    @property
    def is_local(self) -> bool:
        return self.runs[0].method == "local"


@dataclass
class Gathered:
    """All runs of a report, and what had to be left out of it."""

    groups: list[Group]
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[StoredRun]:
        return [run for group in self.groups for run in group.runs]


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """Folders of runs among and below those given, each once, in a fixed order. A run's own folder is not searched further."""
    found: dict[Path, Path] = {}
    for folder in folders:
        top = Path(folder)
        if not top.is_dir():
            raise ConfigError(f"There is no folder {str(top)!r}.")
        here = []
        for name, below, files in os.walk(top):
            if "config.json" in files and _is_run(Path(name) / "config.json"):
                here.append(Path(name))
                below.clear()
            else:
                below[:] = [b for b in below if not b.startswith(".")]
        if not here:
            raise ConfigError(f"The folder {str(top)!r} holds no run: neither it nor a folder below it has a run's config.json.")
        for path in sorted(here):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _is_run(config: Path) -> bool:
    """Other programs write files of this name too. A damaged one beside records is a run, and is spoken of later."""
    try:
        return {"method", "config", "data"} <= read_json(config).keys()
    except (DataError, AttributeError):
        return (config.parent / "records.jsonl").is_file()


def read_run(path: Path) -> StoredRun:
    """One run, finished or not."""
    stored = read_json(path / "config.json")
    records = read_records(path / "records.jsonl") if (path / "records.jsonl").is_file() else []
    optional = {name: read_json(path / f"{name}.json") if (path / f"{name}.json").is_file() else {}
                for name in ("environment", "measures")}
    done = read_json(path / "done") if (path / "done").is_file() else None
    if done is not None and not isinstance(done, dict):
        raise DataError(f"The file {str(path / 'done')!r} is damaged.")
    stopped = done.get("stopped", "done") if done is not None else None
    try:
        run = StoredRun(path, str(stored["config"].get("method") or stored["method"]), stored["config"], stored["data"], records,
                        optional["environment"], optional["measures"], stopped)
        if isinstance(run.about, dict) and isinstance(run.seed, int):
            return run
        raise TypeError
    except (KeyError, AttributeError, TypeError, ValueError):
        raise DataError(f"The file {str(path / 'config.json')!r} is not a run's configuration.") from None


def gather(folders: Sequence[str | Path]) -> Gathered:
    """All runs below the folders. One that cannot be read, or has no scores yet, is left out and named in the notes.

    So are the runs in which a comparison searched its settings: these were chosen on their seed, so that a mean over it flatters.
    """
    runs, unscored, notes = [], [], []
    for path in find_runs(folders):
        try:
            run = read_run(path)
        except ConsilienceError as error:
            notes.append(f"{path.name} is left out. {error}")
            continue
        if not run.scored:
            unscored.append(run)
            continue
        if run.stopped is None:
            notes.append(f"{path.name} is not finished: round {run.records[-1]['round']} of {run.config.get('rounds', '?')}.")
        runs.append(run)
    searched = _searches([*runs, *unscored], {Path(folder).resolve() for folder in folders})          # points that failed among them
    notes += [f"{run.path.name} is left out: no round was scored yet." for run in unscored if run not in searched]
    if not runs:
        raise ConfigError("None of the runs can be shown. " + " ".join(notes))
    if searched:
        seeds = ", ".join(map(str, sorted({run.seed for run in searched})))
        are, them = ("run is", "it") if len(searched) == 1 else ("runs are", "them")
        notes.append(f"{len(searched)} {are} left out as a comparison's search (seed {seeds}): settings were chosen on {them}. A search "
                     f"is told by comparison.json, or by a seed {APART:,} above another beside it. A folder that is named itself is shown.")
    groups, more = group_runs([run for run in runs if run not in searched])
    return Gathered(groups, notes + more)


def _searches(runs: Sequence[StoredRun], named: Collection[Path]) -> list[StoredRun]:
    """Runs of `compare --tune` that are not compared.

    The comparison.json beside them says so, of the last comparison in that folder: what it compared is shown, what it searched is not.
    Of a comparison that was not saved, was interrupted, or was written over by another, the seeds tell: a search's lies so far above the
    first compared one. Somebody's own seeds may lie so too, which the note makes up for; a search taken for a result would flatter unseen.
    """
    beside: dict[Path, set[int]] = {}
    for run in runs:
        beside.setdefault(run.path.parent.resolve(), set()).add(run.seed)
    told = {folder: _seeds_told(folder / "comparison.json") for folder in beside}

    def searched(run: StoredRun) -> bool:
        folder = run.path.parent.resolve()
        compared, tuned_on = told[folder]
        return run.seed in tuned_on or (run.seed not in compared and run.seed - APART in beside[folder])
    return [run for run in runs if run.path.resolve() not in named and searched(run)]


def _seeds_told(comparison: Path) -> tuple[set[int], set[int]]:
    """The seeds that a comparison compared, and the one it searched with; none where there is no such file, or another program's."""
    try:
        stored = read_json(comparison)
        return set(stored["seeds"]), {stored["tuning"]["seed"]} if stored["tuning"] else set()
    except (DataError, OSError, KeyError, TypeError):
        return set(), set()


def group_runs(runs: Sequence[StoredRun]) -> tuple[list[Group], list[str]]:
    """Runs that differ by seed alone form a group. Where a method stands in two groups, what differs is in their labels."""
    notes: list[str] = []
    by_key: dict[str, dict[int, StoredRun]] = {}
    for run in runs:
        seeds = by_key.setdefault(_key(run), {})
        if run.seed in seeds:
            notes.append(f"{run.path.name} is left out: {seeds[run.seed].path.name} has the same settings and seed.")
        seeds.setdefault(run.seed, run)
    members = [tuple(s[seed] for seed in sorted(s)) for s in by_key.values()]
    # clients alone come first, then plain averaging, then the rest as they were named
    members.sort(key=lambda g: {"local": 0, "fedavg": 1}.get(g[0].method, 2))
    names = [g[0].method for g in members]
    groups = []
    for own, name in zip(members, names):
        rivals = [g[0] for g, other in zip(members, names) if other == name]
        groups.append(Group(name if len(rivals) == 1 else f"{name} ({_distinction(own[0], rivals)})", own))
    return groups, notes


def _key(run: StoredRun) -> str:
    """Equal for runs whose results may be averaged. The method's parts count, not the way their names were typed."""
    settings = run.config.get("settings") or {}
    try:
        method: Any = [[p.name, asdict(p)] for p in parse_stack(run.method, settings).parts]   # type: ignore[call-overload]
    except ConsilienceError:                  # a part of the user's own that is not installed here
        method = [run.method, sorted(settings.items())]
    rest = {k: v for k, v in run.config.items() if k not in _NOT_A_METHOD}
    # the split's hash changes with the seed; the data set and the way it is divided do not
    data = {k: run.about.get(k) for k in ("name", "fingerprint", "split", "shift", "clients", "classes")}
    return json.dumps([method, rest, data], sort_keys=True, default=str)


def _distinction(run: StoredRun, rivals: Sequence[StoredRun]) -> str:
    flat = lambda r: {**r.config, **(r.config.get("settings") or {}), "fingerprint": r.about.get("fingerprint")}
    keys = [k for k in flat(run) if k not in _NOT_A_METHOD and len({str(flat(r).get(k)) for r in rivals}) > 1]
    return ", ".join(f"{k}={flat(run)[k]}" for k in keys[:4]) + (", …" if len(keys) > 4 else "")
