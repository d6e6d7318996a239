"""A run's clients on a Ray cluster. The numbers are those of one machine; a worker or a machine that is lost costs time alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...core.engine import ClientTask, Work
from ...core.federation import Federation
from ...core.slot import Slot
from ...core.step import Program
from .._pool import Content
from .._twin import moved, plan_of, server_state
from ..sequential import Sequential
from ..workers import Workers
from .cluster import Cluster, Plan
from .crew import Crew

_owners = itertools.count()


class Ray(Workers):
    """The engine. Workers start with the first work and end with the engine, or with `close`."""

    def __init__(self, program: Program, make_slot: Callable[[Work], Slot], *, crew: Crew) -> None:
        self.crew = crew
        self.here = Sequential(program, make_slot)        # for single pieces of work that a hook asks for
        self._owner = next(_owners)

    @classmethod
    def on(cls, cluster: Cluster, plan: Plan) -> Any:
        """A factory of engines with workers on this cluster."""
        return lambda program, make_slot: cls(program, make_slot, crew=Crew(cluster, plan))

    @classmethod
    def with_crew(cls, crew: Crew) -> Any:
        """A factory of engines that take turns with the same workers."""
        return partial(cls, crew=crew)

    @property
    def notes(self) -> list[str]:
        """What the record should say."""
        lost, machines = self.crew.restarts, len(self.crew.machines)
        out = [f"the workers were on {machines} machine{'' if machines == 1 else 's'}"] if machines else []
        if lost:
            out.append(f"{lost} Ray worker{'s were' if lost > 1 else ' was'} lost; the work was done again by others")
        return out + list(self.crew.heard)

    def close(self) -> None:
        self.crew.close()
        self.crew.cluster.close()

    def _call(self, fed: Federation, task: ClientTask, common: Any, costs: Sequence[float], content: Content) -> Iterator[Any]:
        setting = server_state(fed), task, common
        for result in self.crew.run(self._owner, lambda: plan_of(fed), setting, costs, content):
            yield moved(result, fed.device, whole=True)
