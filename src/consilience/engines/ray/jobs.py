"""Whole jobs on a cluster, such as the runs of a comparison, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from .cluster import Cluster

POLL = 0.25             # seconds between looks at how far the jobs are


class Lost(Exception):
    """A job whose process or machine ended, and ended again when it was tried once more."""


class _Board:
    """Where jobs write how far they are. Ray makes an actor of it."""

    def __init__(self) -> None:
        self.rounds: dict[int, int] = {}

    def write(self, number: int, rounds: int) -> None:
        self.rounds[number] = rounds

    def read(self) -> dict[int, int]:
        return self.rounds


def _one(function: Callable[..., Any], number: int, arguments: tuple[Any, ...], board: Any) -> Any:
    torch.set_num_threads(1)         # as in a worker, so that sums are added in the same order wherever a run lands
    return function(*arguments, lambda rounds: board.write.remote(number, rounds))


def each_job(cluster: Cluster, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], *, on_gpu: bool, at_once: int,
             heard: Callable[[int, int], None]) -> Iterator[tuple[int, Any]]:
    """(number, function(*jobs[number], tell)) in the order in which they end; in place of a result, `Lost`.

    Each has a core, and a GPU if asked for. A job that dies with its process is tried once more. What the jobs say by `tell(n)` reaches
    `heard(number, n)` sooner or later.
    """
    board: Any = ray.remote(_Board).options(num_cpus=0).remote()
    remote: Any = ray.remote(_one).options(num_cpus=1, num_gpus=int(on_gpu), max_retries=1)
    waiting, running = deque(range(len(jobs))), dict[Any, int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.popleft()
                running[remote.remote(function, number, jobs[number], board)] = number
            for ref in ray.wait(list(running), num_returns=1, timeout=POLL)[0]:
                number = running.pop(ref)
                try:
                    yield number, ray.get(ref)
                except RayTaskError:
                    raise                                       # the function's own failures are for it to report
                except RayError as error:
                    yield number, Lost(str(error))
            for number, rounds in ray.get(board.read.remote()).items():
                if number in running.values():
                    heard(number, rounds)
    finally:
        for ref in running:                                     # Ctrl-C: a run's folder can be left at any moment
            ray.cancel(ref, force=True)
        ray.kill(board)
