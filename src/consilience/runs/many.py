"""Many runs, several at a time, each in a folder of its own. Finished ones are only read; a failed one stops no other, unless the GPU
cannot be used: then none is begun any more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from ..blame import place_in_users_code
from ..core.federation import Federation
from ..cuda_start import QUEUES, queues_of_each
from ..data import FederatedData
from ..data.directory import VARIABLE, data_directory
from ..data.sources import make
from ..engines.hardware import usable_cores
from ..engines.workers import one_thread
from ..errors import ConsilienceError, DeviceError, unknown
from ..memory import no_room
from ..metrics.registry import MEASURES
from .config import RunConfig
from .files import read_json
from .folder import default_folder, read_done, read_records
from .listener import Listener, Watcher
from .outside import code_of
from .result import Result
from .run import choose_device, load_data, run_config

Outcome = dict[str, Any] | str              # a run's document, or why there is none

PLACES = ("here", "ray")
POLL = 0.25                                 # seconds between looks at the rounds of running processes
NOTE = 120                                  # bytes of what a process says of its work
LATE = "no time was left to begin it"
DIED = "its process died, perhaps for want of memory; run the same command again to resume, with fewer --jobs if it dies again"
UNGUARDED = ("its process died. A script that defines a measure is imported by every process: put what it runs under "
             "`if __name__ == '__main__':`, or the measure in a module of its own")


class Unusable(str):
    """Why there is no document, where the GPU is to blame and not the run."""


class Then(Protocol):
    """What is done with a run's folder when the run has ended, in the process that ran it. It must be picklable and raise nothing."""

    def reserve(self, folder: str) -> float:
        """Seconds of the time allowed to keep for it: training stops so much earlier."""

    def __call__(self, folder: str, note: Callable[[str], None], until: float | None) -> Any:
        """What it says stands in the run's document under "then"."""


@dataclass(frozen=True)
class Job:
    """One run of many. Without a folder it is not kept."""

    label: str
    config: RunConfig
    folder: str | None
    then: Then | None = None
    ran: bool = False                       # the folder holds the finished run: only `then` is left


def folder_in(out: str | Path | None, config: RunConfig) -> str | None:
    return None if out is None else str(Path(out) / default_folder(config).name)


def default_workers(config: RunConfig) -> int:
    """All cores that this process may use; one run at a time where they would share an accelerator."""
    if config.run.devices or choose_device(config.run.device).type != "cpu":
        return 1
    return usable_cores()


def run_many(jobs: Sequence[Job], what: str, *, workers: int | None = None, again: bool = False,
             watcher: Watcher | None = None, until: float | None = None, on: str = "here") -> list[Outcome]:
    """Every job's outcome, in the order of the jobs. The number of workers does not change a bit of any of them, nor does the place:
    `on` is "here", in processes of this machine, or "ray", on a cluster.

    At the time `until` (of `time.time`) runs under way are cut off between two rounds, and none is begun any more: its outcome is LATE.
    """
    if on not in PLACES:
        raise unknown("place", on, PLACES)
    return _Runs(jobs, what, again, watcher or Watcher(), until).run(workers, on)


class _Runs:
    def __init__(self, jobs: Sequence[Job], what: str, again: bool, watcher: Watcher, until: float | None = None) -> None:
        self.jobs, self.again, self.watcher, self.until = jobs, again, watcher, until
        self.rounds = [0] * len(jobs)
        self.outcomes: dict[int, Outcome] = {}
        self.said: set[str] = set()
        self.notes: dict[int, str] = {}
        self.in_vain = 0                                # runs that found the GPU unusable, since the last that did not
        watcher.begin(what, len(jobs), sum(j.config.run.rounds for j in jobs))

    def run(self, workers: int | None, on: str = "here") -> list[Outcome]:
        for i, job in enumerate(self.jobs):
            if not self.again and not job.ran and (document := read_finished(job)) is not None:
                self.keep(i, document, [])
        left = [i for i in range(len(self.jobs)) if i not in self.outcomes]
        if left and on == "ray":
            self.on_cluster(left, workers)
        elif left:
            workers = max(1, min(workers or default_workers(self.jobs[left[0]].config), len(left)))
            if workers == 1:
                self.here(left)
            else:
                self.in_processes(left, workers)
        return [self.outcomes[i] for i in range(len(self.jobs))]

    def keep(self, i: int, outcome: Outcome, warnings: Sequence[str]) -> None:
        self.outcomes[i] = outcome
        self.in_vain = self.in_vain + 1 if isinstance(outcome, Unusable) else 0
        for message in warnings:
            if message not in self.said:                # the same data give every method the same warnings
                self.said.add(message)
                self.watcher.warned(f"{self.jobs[i].label}: {message}")
        if not self.until:                              # a run that was cut off has not made all of its rounds
            self.heard(i, self.jobs[i].config.run.rounds)
        if outcome != LATE:
            self.watcher.run_done(self.jobs[i].label, outcome if isinstance(outcome, str) else None)

    def heard(self, i: int, round_number: int) -> None:
        if round_number != self.rounds[i]:
            found = self.rounds[i] == 0 and i not in self.notes     # no client was heard of yet
            self.rounds[i] = round_number
            (self.watcher.rounds_found if found else self.watcher.rounds_done)(sum(self.rounds))

    def noted(self, i: int, note: str) -> None:
        if note != self.notes.get(i, ""):
            self.notes[i] = note
            self.watcher.noted(self.jobs[i].label, note)

    def leave(self, places: Sequence[int]) -> None:
        """Begin none of these: what the last run found will hold for them."""
        why = next(o for o in reversed([*self.outcomes.values()]) if isinstance(o, Unusable))
        self.outcomes.update(dict.fromkeys(places, why))

    def here(self, left: Sequence[int]) -> None:
        try:
            for n, i in enumerate(left):
                if self.in_vain:
                    return self.leave(left[n:])
                job = self.jobs[i]
                with one_thread():       # as in a worker, so that sums are added in the same order with any number of workers
                    self.keep(i, *_attempt(job.config.flat(), job.folder, self.again, partial(self.heard, i), self.until, job.then,
                                           job.ran, partial(self.noted, i)))
        finally:
            _LOADED.clear()

    def on_cluster(self, left: list[int], at_once: int | None) -> None:
        from .cluster import runs_on_cluster
        jobs = [self.jobs[i] for i in left]
        assert not any(job.then for job in jobs), "what follows a run is done where its folder lies"
        for place, ended in runs_on_cluster(jobs, at_once=at_once, again=self.again, until=self.until,
                                            heard=lambda place, n: self.heard(left[place], n)):
            self.keep(left[place], *ended)

    def in_processes(self, left: list[int], workers: int) -> None:
        """A process that dies takes its pool along: the runs it may have been are tried once more, each alone."""
        while left:
            suspects = self.in_pool(left, workers)
            for i in suspects:
                if self.in_pool([i], 1):
                    self.keep(i, UNGUARDED if _script_has_measures() else DIED, [])
            left = [i for i in left if i not in self.outcomes]

    def in_pool(self, left: Sequence[int], workers: int) -> list[int]:
        """Run what is left. Returns the runs under way when a process died, if one did."""
        context = get_context("spawn")
        rounds = context.RawArray("q", [-1] * len(self.jobs))          # written by the workers, read here
        notes = context.RawArray("c", NOTE * len(self.jobs))
        before = set(active_children())
        start = rounds, notes, queues_of_each(workers)
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=start)
        running: dict[Future[tuple[Outcome, list[str]]], int] = {}
        try:
            with _without_the_script(), _deaf_to_ctrl_c():
                for i in left:
                    job = self.jobs[i]
                    running[pool.submit(_in_worker, i, job.config.flat(), job.folder, self.again, self.until, job.then, job.ran)] = i
            while running:
                done = wait(running, timeout=POLL, return_when=FIRST_COMPLETED).done
                for i in running.values():
                    self.heard(i, max(0, rounds[i]))
                    self.noted(i, notes[i * NOTE: (i + 1) * NOTE].rstrip(b"\0").decode(errors="ignore"))
                for future in done:
                    self.keep(running[future], *future.result())
                    del running[future]
                if self.in_vain >= workers and not any(rounds[i] > 0 for i in running.values()):
                    left_out = [future for future in running if future.cancel()]
                    self.leave([running.pop(future) for future in left_out])
        except BrokenProcessPool:
            return [i for i in running.values() if rounds[i] >= 0] or list(running.values())
        except BaseException:
            # A run's folder can be left at any moment, so that nobody has to wait for rounds to end.
            for child in set(active_children()) - before:
                child.kill()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return []


def _script_has_measures() -> bool:
    return any(measure.__module__ == "__main__" for measure in MEASURES.values())


@contextmanager
def _without_the_script() -> Iterator[None]:
    """Processes started meanwhile do not import the program that calls us.

    A spawned process does so first of all, and a script that compares methods without asking for its `__name__` would start over
    in every one of them. Runs are told by their settings and need nothing of it, unless the script defines a measure.
    """
    script = sys.modules["__main__"]
    if not _script_has_measures():
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started meanwhile do not hear Ctrl-C, which is ours to handle; a terminal sends it to all of them.

    One that is still importing would end in a traceback. What is blocked here is blocked in them from their first moment, and here
    it arrives afterwards. Windows cannot block signals; there `_start_worker` ignores it, some moments later.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- one run ---------------------------------------------------------------------------------------------------------

class _Ear(Listener):
    def __init__(self, heard: Callable[[int], None], note: Callable[[str], None]) -> None:
        self.heard, self.note, self.warnings, self.done = heard, note, list[str](), 0

    def started(self, federation: Federation, rounds: int, done: int) -> None:
        self.done = done
        self.heard(done)

    def client_done(self, done: int, of: int) -> None:
        self.note(f"round {self.done + 1}, client {done} of {of}")

    def scoring(self) -> None:
        self.note(f"round {self.done + 1}, scoring")

    def round_done(self, record: dict[str, Any]) -> None:
        self.done = record["round"]
        self.heard(self.done)

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def _attempt(flat: dict[str, Any], folder: str | None, again: bool, heard: Callable[[int], None],
             until: float | None = None, then: Then | None = None, ran: bool = False,
             note: Callable[[str], None] = lambda text: None) -> tuple[Outcome, list[str]]:
    """A document, or what went wrong in words: a worker's traceback is of no use to a user."""
    ear = _Ear(heard, note)
    stop = until - then.reserve(folder) if until is not None and then is not None and folder is not None and not ran else until
    if stop is not None and time.time() >= stop:
        return LATE, []
    try:
        config = RunConfig.make(flat)
        if ran:
            document: dict[str, Any] = {}
            heard(config.run.rounds)
        else:
            document = run_config(config, out=folder, again=again, listener=ear, cores=1, data=_data_of(config), until=stop).document()
        if then is not None and folder is not None and (Path(folder) / "done").is_file():
            document["then"] = then(folder, note, until)
        return document, ear.warnings
    except DeviceError as error:
        return Unusable(error), ear.warnings
    except ConsilienceError as error:
        return str(error), ear.warnings
    except Exception as error:
        place = place_in_users_code(error)
        told = None if place else no_room(error)
        return told or f"{type(error).__name__}: {error}{f' ({place})' if place else ''}", ear.warnings


_LOADED: dict[str, FederatedData] = {}             # of this process, while it works through a set of runs


def _data_of(config: RunConfig) -> FederatedData:
    """Runs in a row that differ by method alone read and divide their data once."""
    key = json.dumps([config.run.data, os.environ.get(VARIABLE), config.data_settings()])
    if key not in _LOADED:
        _LOADED.clear()
        _LOADED[key] = load_data(config)
    return _LOADED[key]


_SHARED: list[Any] = []                            # rounds and notes, read by the parent


def _start_worker(rounds: Any, notes: Any, queues: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the parent's to handle
    if queues is not None:
        os.environ[QUEUES] = str(queues)                    # CUDA has not started here yet
    torch.set_num_threads(1)
    _SHARED[:] = [rounds, notes]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However the parent ends, no process stays behind to hold the locks of its folders."""
    parent = parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _in_worker(number: int, flat: dict[str, Any], folder: str | None, again: bool, until: float | None, then: Then | None,
               ran: bool) -> tuple[Outcome, list[str]]:
    rounds, notes = _SHARED
    rounds[number] = 0

    def heard(n: int) -> None:
        rounds[number] = n

    def note(text: str) -> None:
        notes[number * NOTE: (number + 1) * NOTE] = text.encode()[:NOTE].ljust(NOTE, b"\0")
    return _attempt(flat, folder, again, heard, until, then, ran, note)


# ---- folders ---------------------------------------------------------------------------------------------------------

def read_finished(job: Job) -> dict[str, Any] | None:
    """The document of a finished run, without loading its data. None where it has to be run, or where something is odd."""
    if job.folder is None or not (Path(job.folder) / "done").is_file():
        return None
    path = Path(job.folder)
    try:
        stored, done = read_json(path / "config.json"), read_done(path)
        if not job.config.agrees(stored["config"]) or "hash" not in stored["data"] or stored.get("code", {}) != code_of(job.config):
            return None                                     # running it will say what differs
        if _newer_files(job.config, (path / "done").stat().st_mtime):
            return None                                     # reading the data will tell whether they are still the same
        records = read_records(path / "records.jsonl")
        # a document needs no federation, and making one is what takes the time
        result = Result(stored["config"], stored["method"], stored["data"], records, None, stopped=done["stopped"])  # type: ignore[arg-type]
        return result.document()
    except (ConsilienceError, KeyError, TypeError, AttributeError, OSError):
        return None


def _newer_files(config: RunConfig, since: float) -> bool:
    """Whether files that the user named as data were written after this time. Published data sets have checksums of their own."""
    named = getattr(make(config.run.data), "path", None)
    if not named:
        return False
    places = [Path(named).expanduser(), data_directory(config.run.data_dir) / named]
    place = next((p for p in places if p.exists()), None)
    files = [] if place is None else [place, *place.rglob("*")] if place.is_dir() else [place]
    return any(file.stat().st_mtime > since for file in files)
