"""A worker process: builds the federation it is told, then does one task after another with what it is given.

Started as `python -m consilience.engines._worker FOLDER NAME`; tasks come through standard input, results leave through what
was standard output. When standard input closes, the process that owns it has closed or died: the worker ends at once, in the
middle of a step if need be.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..core.federation import Federation
from ._parcel import Reader, Region
from ._plain import describe_error
from ._twin import Guests, build_twin
from ._wire import receive, send
from .sequential import Sequential


class Worker:
    """What a worker remembers between messages."""

    def __init__(self, folder: Path, name: str) -> None:
        self.reader = Reader(folder, orders=True)
        self.out = [Region(folder, f"{name}.out{i}") for i in range(2)]      # a result is read before its region is written again
        self.fed: Federation | None = None
        self.task: Any = None
        self.common: Any = None

    def build(self, parcel: Any) -> None:
        self.fed = build_twin(self.reader.read_plan(parcel), Sequential)

    def set_up(self, parcel: Any) -> None:
        """What all tasks of one call share: the server's state, the task and what it is told in common."""
        assert self.fed is not None
        state, self.task, self.common = self.reader.read(parcel, copy=False)
        for name, value in state.items():
            setattr(self.fed, name, value)

    def work(self, place: int, parcel: Any) -> Any:
        assert self.fed is not None
        number, state, given = self.reader.read(parcel, copy=False)
        assert isinstance(self.fed.clients, Guests)
        self.fed.clients.host({number: state or self.fed.clients.fresh})
        with torch.no_grad():
            answer = self.out[place].write(self.task(self.fed, number, self.common, given))
        self.reader.let_go()
        return answer


def _listen(pipe: BinaryIO, messages: queue.SimpleQueue[Any], folder: Path) -> None:
    while (message := receive(pipe)) is not None:
        messages.put(message)
    shutil.rmtree(folder, ignore_errors=True)          # its owner may have had no time to
    os._exit(0)


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    for name_of_signal in ("SIGINT", "SIGBREAK"):      # Ctrl-C is the owner's business; it closes the pipe
        if hasattr(signal, name_of_signal):
            signal.signal(getattr(signal, name_of_signal), signal.SIG_IGN)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                                       # what parts print must not run into the results
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages, folder), daemon=True).start()
    worker = Worker(folder, name)
    send(results, ("ready",))
    while True:
        kind, *rest = messages.get()
        ticket = rest[0] if kind == "work" else None
        try:
            answer = getattr(worker, kind)(*rest[1:] if kind == "work" else rest)
            if kind == "work":
                send(results, ("done", ticket, answer))
        except Exception as error:
            send(results, ("failed", ticket, describe_error(error), traceback.format_exc()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
