"""Where the runs of a recipe lie, and what they hold. Names and contents say nothing about a machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..engines.choose import choose
from ..errors import ConsilienceError, DataError
from ..report.gather import StoredRun, read_run
from ..runs.files import read_json, write_json
from ..runs.reload import OpenedRun, open_run
from ..runs.run import choose_device
from .check import method_facts, run_facts
from .format import Cell, scaled_rounds
from .records import csv_of, read_csv_run

RUNS = "runs"
MEASURES = "recipe_measures.json"
HALFWAY = "recipe_measures_halfway.json"                     # of measures that were stopped
_MACHINE = ("engine", "device", "track", "eval_batch")       # how a run is carried out, not what it computes


def cell_values(cell: Cell, seed: int, *, scale: float = 1.0, scaled: Sequence[str] = (), engine: str | None = None,
                device: str | None = None, changed: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Settings of a cell's run. With a scale the rounds shrink, and so do the settings that the recipe names as scaled."""
    assert cell.values is not None
    values = {**cell.values, **dict(changed), "seed": seed, "rounds": scaled_rounds(cell.rounds, scale)}
    if scale != 1.0 and scaled:
        facts, run = method_facts(cell.method, values.get("settings", {})), run_facts(values)
        shrunk = {p: scaled_rounds(facts.options[p], scale) for p in scaled if p in facts.options}
        values |= {n: scaled_rounds(run[n], scale) for n in scaled if n in run and run[n] is not None}
        values["settings"] = {**values.get("settings", {}), **shrunk}
    return {**values, **({"engine": engine} if engine else {}), **({"device": device} if device else {})}


def essence(values: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's numbers: settings that differ from the defaults. New settings of later versions leave it as it is."""
    facts, run, defaults = method_facts(values["method"], values.get("settings", {})), run_facts(values), run_facts({})
    kept = {k: v for k, v in run.items() if k not in (*_MACHINE, "method", "settings")
            and (v != defaults.get(k) or k in ("data", "rounds", "seed"))}
    return {**kept, "method": facts.canonical, **({"settings": dict(facts.changed)} if facts.changed else {})}


def run_folder(runs: Path, values: Mapping[str, Any]) -> Path:
    """One folder per run: cells that need the same run share it."""
    whole = essence(values)
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:10]
    method = "".join(ch if ch.isalnum() or ch in "+-_." else "-" for ch in whole["method"])[:60]
    return runs / f"{method}-{whole['data'].partition('(')[0]}-{digest}-seed{whole['seed']}"


def stored_run(folder: Path, values: Mapping[str, Any]) -> StoredRun | None:
    """What a folder holds of a run, finished or not, or the records kept of it as CSV; None where it was not begun."""
    if (folder / "config.json").is_file():
        done = folder / "done"
        run = _finished(folder, done.stat().st_mtime_ns) if done.is_file() else read_run(folder)
    else:
        kept = read_csv_run(folder)
        if kept is None:
            return None
        run = kept
    for key, value in essence(values).items():
        if run.config.get(key) != value and key != "weights":            # stored as the method settled them
            raise DataError(f"The folder {folder.name} holds a run with {key} = {run.config.get(key)!r}, not {value!r}. "
                            "Remove it, or use --again.")
    return run


@lru_cache(maxsize=256)
def _finished(folder: Path, ended: int) -> StoredRun:
    """Tables are written whenever a run has ended; those that had ended before are not read again."""
    return read_run(folder)


def settle_machine(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """A run goes on with the engine and device it was begun with; on a machine that lacks them, with what that machine has."""
    file = folder / "config.json"
    if not file.is_file():
        return values
    stored = read_json(file)
    machine = {name: stored["config"].get(name, "auto") for name in ("engine", "device")}
    try:
        fits = choose_device(machine["device"]).type == "cuda" or machine["engine"] != "slots"
    except ConsilienceError:
        fits = False
    if not fits:
        machine = {"engine": "auto", "device": "auto"}
        write_json(file, {**stored, "config": {**stored["config"], **machine}})
    return {**values, **machine}


def drop_measures(folder: Path) -> None:
    for name in (MEASURES, HALFWAY):
        (folder / name).unlink(missing_ok=True)


def known_measures(path: Path) -> dict[str, Any]:
    """Results of measures by their text, of a run's folder or of its records as CSV. A damaged file is measured anew."""
    if path.is_file():
        kept = read_csv_run(path.with_name(path.name.removesuffix(".csv")))
        return kept.measures if kept else {}
    try:
        return read_json(path / MEASURES) if (path / MEASURES).is_file() else {}
    except ConsilienceError:
        return {}


@contextmanager
def opened(folder: Path, data_dir: str | None = None) -> Iterator[OpenedRun]:
    """A run to measure or draw. Local training is played by the engine that trains on this device."""
    run = open_run(folder, data_dir)
    if run.federation.device.type == "cuda":
        choose("auto", run.federation).settle(run.federation)
    threads = torch.get_num_threads()
    try:
        yield run
    finally:
        getattr(run.federation.engine, "close", lambda: None)()
        torch.set_num_threads(threads)


__all__ = ["HALFWAY", "MEASURES", "RUNS", "cell_values", "csv_of", "drop_measures", "essence", "known_measures", "opened", "run_folder",
           "scaled_rounds", "settle_machine", "stored_run"]
