"""All cores of a machine: single-threaded processes with shared memory, one per core, the longest clients first.

The numbers are those of the sequential engine on one thread, bit for bit, whatever the number of workers and whichever of
them dies on the way.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..core.client import train_client
from ..core.engine import ClientTask, Work
from ..core.federation import Federation
from ..core.slot import Slot
from ..core.step import Program
from ._pool import Content, Pool
from ._twin import for_twins, plan_of, server_state
from .hardware import usable_cores
from .sequential import Sequential

_owners = itertools.count()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """The engine. Processes start with the first work and end with the engine, or with `close`."""

    def __init__(self, program: Program, make_slot: Callable[[Work], Slot], *, count: int | None = None, pool: Pool | None = None) -> None:
        self.pool = pool or Pool(count or usable_cores())
        self.here = Sequential(program, make_slot)              # for single pieces of work that a hook asks for
        self._owner = next(_owners)

    @classmethod
    def of(cls, count: int) -> Any:
        """A factory of engines with so many workers."""
        return partial(cls, count=count)

    @classmethod
    def sharing(cls, pool: Pool) -> Any:
        """A factory of engines that take turns with the same processes."""
        return partial(cls, pool=pool)

    def close(self) -> None:
        self.pool.close()

    @property
    def notes(self) -> list[str]:
        """What the record should say."""
        died = self.pool.restarts
        return [f"{died} worker process{'es' if died > 1 else ''} died; the work was done again by others"] if died else []

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        works = list(works)
        if not (ours := for_twins(works)):
            with one_thread():
                yield from self.here.run(works)
            return
        fed = ours[0].fed
        yield from self._call(fed, train_client, ours[0].cohort, [w.steps for w in ours],
                              lambda i: (ours[i].number, self._carried(fed, ours[i].state), ours[i].download))

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]:
        return self._call(fed, task, common, [fed.samples.size_of(i) for i in numbers],
                          lambda i: (numbers[i], self._carried(fed, fed.client(numbers[i])), given[i]))

    @staticmethod
    def _carried(fed: Federation, state: Any) -> Any:
        """A client's state as it travels: nothing for one who has none, since the workers know the fresh state."""
        return None if state is fed.clients.fresh else state

    def _call(self, fed: Federation, task: ClientTask, common: Any, costs: Sequence[float], content: Content) -> Iterator[Any]:
        return self.pool.run(self._owner, plan_of(fed), (server_state(fed), task, common), costs, content)
