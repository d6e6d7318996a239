"""Several methods, several seeds, one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, ConsilienceError
from ..report.tables import Table
from .config import RunConfig
from .folder import default_folder
from .run import Listener, run_config
from .statistics import paired, spread

Row = dict[str, Any]


def _one(flat: dict[str, Any], out: str | None, again: bool) -> dict[str, Any]:
    """One run in a process of its own, on one thread, so that the number of processes does not change a bit."""
    torch.set_num_threads(1)
    return run_config(RunConfig.make(flat), out=out, again=again).document()


def _in_process(flat: dict[str, Any], out: str | None, again: bool) -> dict[str, Any] | str:
    """Errors travel as text: a worker's traceback is of no use to a user."""
    try:
        return _one(flat, out, again)
    except ConsilienceError as error:
        return str(error)


class Comparison:
    """The runs of a comparison and what they say together."""

    def __init__(self, methods: Sequence[str], seeds: Sequence[int], documents: dict[tuple[str, int], dict[str, Any]],
                 failures: dict[tuple[str, int], str], reference: str) -> None:
        self.methods, self.seeds, self.documents, self.failures, self.reference = methods, seeds, documents, failures, reference

    def values(self, method: str, model: str, measure: str) -> list[float | None]:
        """One value per seed, of the last scored round."""
        out = []
        for seed in self.seeds:
            last = self.documents.get((method, seed), {}).get("summary", {}).get("last") or {}
            out.append((last.get(model) or {}).get(measure))
        return out

    def rows(self) -> list[Row]:
        rows = []
        for method in self.methods:
            row: Row = {"name": method, "seeds": list(self.seeds)}
            for label, model, measure in COLUMNS:
                values = self.values(method, model, measure)
                summary = spread(values)
                row[label] = None if summary is None else {"mean": summary.mean, "std": summary.std, "values": values}
            gain = paired(self.values(method, "personalised", "accuracy"), self.values(self.reference, "personalised", "accuracy"))
            row["gain"] = gain.as_dict() | {"over": self.reference} if gain and method != self.reference else None
            failed = {str(s): self.failures[method, s] for s in self.seeds if (method, s) in self.failures}
            row["failures"] = failed or None
            rows.append(row)
        return rows

    def table(self, title: str = "") -> Table:
        header = ["method", "global", "personalised", "worst client", f"gain over {self.reference}", "p"]
        body, rows = [], self.rows()
        for row in rows:
            cells = [row["name"]]
            for label, _, _ in COLUMNS:
                cell = row[label]
                cells.append("–" if cell is None else
                             f"{cell['mean']:.3f}" + (f" ± {cell['std']:.3f}" if cell["std"] is not None else ""))
            gain = row["gain"]
            if gain is None:
                cells += ["", ""]
            else:
                interval = f" [{gain['low']:+.3f}, {gain['high']:+.3f}]" if gain["low"] is not None else ""
                cells += [f"{gain['difference']:+.3f}{interval}", "–" if gain["p_value"] is None else f"{gain['p_value']:.3f}"]
            body.append(cells)
        notes = ["Accuracies of the last round on the clients' test samples, mean ± standard deviation over "
                 f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}; – where a method has no such model.",
                 f"Gain: personalised accuracy minus {self.reference}'s, seed by seed, with a 95 % t interval and the paired test's p."]
        notes += [f"{m}, seed {s} failed: {why}" for (m, s), why in self.failures.items()]
        return Table(header, body, title, notes, rows)


COLUMNS = (("global", "global", "accuracy"), ("personalised", "personalised", "accuracy"), ("worst", "personalised", "worst"))


def compare(methods: Sequence[str], base: RunConfig, seeds: Sequence[int], *, out: str | Path | None = None, jobs: int | None = None,
            with_local: bool = True, again: bool = False, overrides: dict[str, dict[str, Any]] | None = None,
            on_done: Callable[[str, int, dict[str, Any] | str], None] = lambda m, s, d: None) -> Comparison:
    """Run every method with every seed, in parallel where there are cores, and put the results side by side.

    Each run is kept in a folder of its own under `out`, so that an interrupted comparison goes on where it was. `overrides`
    gives single methods settings of their own. A run that fails is reported in its row; the others go on.
    """
    names = list(dict.fromkeys((["local"] if with_local else []) + list(methods)))
    if not names:
        raise ConfigError("A comparison needs at least one method.")
    configs: dict[tuple[str, int], RunConfig] = {}
    for name in names:
        own = (overrides or {}).get(name, {})
        settings = {k: v for k, v in base.settings.items() if _applies(k, name, base)} | dict(own.get("settings", {}))
        rest = {k: v for k, v in own.items() if k != "settings"}
        for seed in seeds:
            configs[name, seed] = base.replace(method=name, settings=settings, seed=seed, **rest)
    _refuse_settings_of_nobody(base, names)
    where = lambda c: None if out is None else str(Path(out) / default_folder(c).name)
    documents: dict[tuple[str, int], dict[str, Any]] = {}
    failures: dict[tuple[str, int], str] = {}

    def keep(key: tuple[str, int], outcome: dict[str, Any] | str) -> None:
        if isinstance(outcome, str):
            failures[key] = outcome
        else:
            documents[key] = outcome
        on_done(*key, outcome)

    workers = max(1, min(jobs or _cores(), len(configs)))
    if workers == 1:
        for key, config in configs.items():
            keep(key, _in_process(config.flat(), where(config), again))
    else:
        _in_pool(configs, where, again, workers, keep)
    reference = "fedavg" if "fedavg" in names else names[0]
    return Comparison(names, seeds, documents, failures, reference)


def _in_pool(configs: dict[tuple[str, int], RunConfig], where: Callable[[RunConfig], str | None], again: bool, workers: int,
             keep: Callable[[tuple[str, int], dict[str, Any] | str], None]) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_in_process, c.flat(), where(c), again): key for key, c in configs.items()}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    try:
                        keep(key, future.result())
                    except BrokenProcessPool:
                        keep(key, "its process died; run the same command again to go on")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _applies(path: str, method: str, base: RunConfig) -> bool:
    """Whether a setting like dbe.kappa concerns a method of the comparison."""
    try:
        base.replace(method=method, settings={path: base.settings[path]})
    except ConfigError as error:
        if "is not in the method" in str(error):
            return False
        raise
    return True


def _refuse_settings_of_nobody(base: RunConfig, names: Sequence[str]) -> None:
    for path in base.settings:
        if not any(_applies(path, name, base) for name in names):
            raise ConfigError(f"The setting {path!r} belongs to none of the methods compared: {', '.join(names)}.")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["Comparison", "Listener", "compare"]
