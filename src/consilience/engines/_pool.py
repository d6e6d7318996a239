"""The processes of the workers engine: started, given work, replaced when they die, and gone when their owner is."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConsilienceError
from ._parcel import Reader, Region, shared_folder
from ._plain import rebuild_error
from ._plan import MAIN
from ._wire import IN_A_WORKER, receive, send

AHEAD = 2               # tasks a worker holds: one at work, one waiting, so that it never waits for us
MOST_ATTEMPTS = 10      # a task that has ended so many workers will end the next one as well
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")


class WorkerError(ConsilienceError):
    """A worker process failed in a way that another one would repeat."""

    exit_code = 5


Content = Callable[[int], Any]      # what is sent for the i-th task; asked for when it is sent, so that few are in memory


class _Process:
    """One worker as its owner sees it."""

    def __init__(self, folder: Path, name: str, inbox: queue.SimpleQueue[Any]) -> None:
        self.folder, self.name = folder, name
        self.regions = [Region(folder, f"{name}.in{i}") for i in range(AHEAD)]
        self.tickets: deque[int] = deque()            # handed over and not answered, oldest first
        self.handed = 0
        self.ready = False
        self.knows: tuple[int, int] = (-1, -1)        # federation built, call set up
        main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
        group: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else \
            {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}       # Ctrl-C is for the owner alone
        self.process = subprocess.Popen(
            [sys.executable, "-m", "consilience.engines._worker", str(folder), name], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, **_ONE_THREAD, IN_A_WORKER: "1", MAIN: str(main),
                                         "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}, **group)
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def _listen(self, inbox: queue.SimpleQueue[Any]) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while (message := receive(self.process.stdout)) is not None:      # type: ignore[arg-type]
                inbox.put((self, message))
        inbox.put((self, ("gone",)))

    def tell(self, *message: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):            # it is gone; its listener will say so
            send(self.process.stdin, message)         # type: ignore[arg-type]

    def hand(self, ticket: int, content: Any) -> None:
        place = self.handed % AHEAD
        self.handed += 1
        self.tickets.append(ticket)
        self.tell("work", ticket, place, self.regions[place].write(content))

    def bury(self) -> None:
        """Free what a dead worker held."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        for region in self.regions:
            region.drop()
        for path in self.folder.glob(f"{self.name}.*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _end(processes: list[_Process], folder: Path) -> None:
    """Close every worker and remove the shared memory."""
    for p in processes:
        with contextlib.suppress(OSError):
            if p.process.stdin is not None:
                p.process.stdin.close()
    for p in processes:
        try:
            p.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            p.process.kill()
            p.process.wait()
    processes.clear()
    shutil.rmtree(folder, ignore_errors=True)


class Pool:
    """Worker processes that can serve one federation after another. Nothing is started before the first call."""

    def __init__(self, count: int) -> None:
        if os.environ.get(IN_A_WORKER):
            raise ConfigError("A worker process was about to start workers: the script that trains runs again when its classes are "
                              "imported. Put the training under `if __name__ == '__main__':`, or the classes in a module.")
        self.count = count
        self.restarts = 0                             # workers that died and were replaced
        self.processes: list[_Process] = []
        self._numbers = itertools.count()
        self._finalizer: Any = None
        self._call, self._busy = 0, False             # calls so far; the last one is not finished

    def start(self) -> None:
        if self._finalizer is not None and self._finalizer.alive:
            return
        self.folder = shared_folder()
        self.processes = []
        # ends the workers when the pool is forgotten, and at the latest when the interpreter ends
        self._finalizer = weakref.finalize(self, _end, self.processes, self.folder)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reader = Reader(self.folder)
        self._plan, self._setting = Region(self.folder, "plan"), Region(self.folder, "setting")
        self._built = -1
        for _ in range(self.count):
            self._add()

    def _add(self) -> None:
        self.processes.append(_Process(self.folder, f"w{next(self._numbers)}", self._inbox))

    def close(self) -> None:
        """End all workers now, whatever they are doing. The next call starts new ones."""
        self._busy = False
        if self._finalizer is not None:
            self._finalizer()

    def run(self, owner: int, plan: Any, setting: Any, costs: Sequence[float], content: Content) -> Iterator[Any]:
        """Results in the order of tasks. `plan` is what to build for this owner, `setting` what the tasks share."""
        if self._busy:
            self.close()                              # an earlier call was left in the middle
        self.start()
        if self._built != owner:
            self._plan_parcel, self._built = self._plan.write_plan(plan), owner
        self._setting_parcel = self._setting.write(setting)
        self._call += 1
        call, given, self._busy = self._call, 0, bool(costs)
        try:
            for result in self._serve(costs, content):
                given += 1
                self._busy = given < len(costs)
                yield result
        finally:
            if given < len(costs) and call == self._call:
                self.close()       # an error, Ctrl-C or a caller that left: what the workers still do is of no use to anyone

    def _serve(self, costs: Sequence[float], content: Content) -> Iterator[Any]:
        waiting = deque(sorted(range(len(costs)), key=lambda i: -costs[i]))
        attempts = [0] * len(costs)
        results: dict[int, Any] = {}
        unstarted = 0
        given = 0
        while given < len(costs):
            self._feed(content, waiting)
            try:
                worker, (kind, *rest) = self._inbox.get(timeout=1.0)     # so that Ctrl-C is heard on every system
            except queue.Empty:
                continue
            if kind == "ready":
                worker.ready, unstarted = True, 0
            elif kind == "gone":
                if worker in self.processes:
                    unstarted = self._replace(worker, waiting, attempts, unstarted)
            elif kind == "failed":
                raise_from_worker(rebuild_error(rest[1]), rest[2])
            elif worker.tickets and worker.tickets[0] == rest[0]:
                worker.tickets.popleft()
                results[rest[0]] = self.reader.read(rest[1], copy=True)
            while given in results:
                self._feed(content, waiting)            # the worker goes on while the caller looks at the result
                yield results.pop(given)
                given += 1

    def _feed(self, content: Content, waiting: deque[int]) -> None:
        """Hand tasks to whoever has room, the least loaded first."""
        free = [p for p in self.processes if p.ready]
        for load in range(AHEAD):
            for p in free:
                if waiting and len(p.tickets) == load:
                    self._prepare(p)
                    ticket = waiting.popleft()
                    p.hand(ticket, content(ticket))

    def _prepare(self, p: _Process) -> None:
        if p.knows[0] != self._built:
            p.tell("build", self._plan_parcel)
        if p.knows != (self._built, self._call):
            p.tell("set_up", self._setting_parcel)
        p.knows = (self._built, self._call)

    def _replace(self, worker: _Process, waiting: deque[int], attempts: list[int], unstarted: int) -> int:
        """A worker died: others do again what it held. Its results never count twice, so nothing else changes."""
        self.processes.remove(worker)
        worker.bury()
        if not worker.ready:
            unstarted += 1
            if unstarted >= 3:
                raise WorkerError(f"Worker processes end before they are ready (exit status {worker.process.returncode}); what they "
                                  "printed stands above. Use engine=sequential to train in this process.")
        waiting.extendleft(reversed(worker.tickets))
        if worker.tickets:
            at_work = worker.tickets[0]
            attempts[at_work] += 1
            if attempts[at_work] >= MOST_ATTEMPTS:
                raise WorkerError(f"One client's work ended {MOST_ATTEMPTS} worker processes (exit status {worker.process.returncode}; "
                                  "−9 is often the system running out of memory). Use fewer workers, or a smaller batch.")
        self.restarts += worker.ready
        self._add()
        return unstarted


def raise_from_worker(error: Exception | None, text: str) -> None:
    """The error itself where it could travel, with where it happened."""
    if error is None:
        raise WorkerError(f"A worker process failed:\n{text}")
    error.add_note(f"In a worker process:\n{text}")
    raise error
