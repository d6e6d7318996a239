"""Local training as the next round would do it, looked at without touching the federation.

A federation's states are replaced, never written to, so a shallow copy can play the next round and be thrown away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.client import ClientState, Outcome
from ..core.engine import Engine, Work
from ..core.federation import Federation
from ..core.part import Model
from ..core.samples import steps_in
from ..core.store import ClientStore


@dataclass(frozen=True)
class Trained:
    """What the next round leaves behind: clients as trained, and the global model after aggregation."""

    outcomes: dict[int, Outcome]              # clients that made at least one step
    aggregated: Model
    exchanged: bool                           # models were averaged


class _Overlay(ClientStore):
    """Another store's states under changes that are kept here alone."""

    def __init__(self, below: ClientStore) -> None:
        super().__init__(below.fresh)
        self.below: ClientStore | None = below
        self.changed: dict[int, ClientState] = {}

    def _read(self, number: int) -> ClientState:
        if number in self.changed or self.below is None:
            return self.changed.get(number, self.fresh)
        return self.below.get(number)

    def _write(self, states: Mapping[int, ClientState]) -> None:
        self.changed.update(states)

    def _numbers(self) -> Iterator[int]:
        return iter({*self.changed, *self.below.numbers()} if self.below else self.changed)

    def _forget(self) -> None:
        self.below, self.changed = None, {}


def twin(fed: Federation) -> Federation:
    """A copy that can play rounds of its own. No client is lost in it."""
    other = copy.copy(fed)
    other.versions = dict(fed.versions)
    other.policy = replace(fed.policy, dropout=0.0)
    other.clients = _Overlay(fed.clients)
    other.on_client = lambda done, of: None
    return other


class _Keeping:
    """An engine that hands on another's results and keeps those of the round's own work."""

    def __init__(self, engine: Engine, tell: Callable[[int], None]) -> None:
        self.engine, self.tell = engine, tell
        self.outcomes: dict[int, Outcome] = {}

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        works = list(works)
        for work, outcome in zip(works, self.engine.run(works)):
            if work.kind == "round":
                self.outcomes[work.number] = outcome
                self.tell(len(self.outcomes))
            yield outcome


def train_all(fed: Federation, tell: Callable[[int, int], None] = lambda done, of: None, clients: Sequence[int] | None = None) -> Trained:
    """The next round with every client in it, or with those given."""
    other = twin(fed)
    cohort = range(fed.size) if clients is None else clients
    engine = _Keeping(fed.engine, lambda done: tell(done, len(cohort)))
    other.engine = engine
    report = other.round(cohort)
    return Trained(engine.outcomes, other.model, report.exchanged)


class _Enough(Exception):
    """The client watched is done; the rest of the round is of no interest."""


class _Watching:
    """An engine that runs the first client step by step, shows its model and stops there."""

    def __init__(self, fed: Federation, number: int, every: int, show: Callable[[int, int, Model], None]) -> None:
        self.fed, self.number, self.every, self.show = fed, number, every, show

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        for work in works:
            if work.kind != "round":
                yield from self.fed.engine.run([work])
                continue
            assert work.number == self.number
            self._walk(work)
            raise _Enough

    def _walk(self, work: Work) -> None:
        program, slot = self.fed.program, self.fed.make_slot(work)
        work.load(slot)
        total, done = steps_in(work.schedule), 0
        self.show(0, total, slot.model)
        for phase, sizes in work.schedule:
            program.begin(slot, phase)
            for size in sizes:
                program.step(slot, phase, size)
                done += 1
                if done % self.every == 0 or done == total:
                    self.show(done, total, slot.model)


def watch_client(fed: Federation, number: int, every: int, show: Callable[[int, int, Model], None],
                 clients: Sequence[int] | None = None) -> None:
    """One client's local training in the next round. `show(step, of, model)` sees the start, every `every` steps and the end.

    All clients, or those given, take part in what comes before training (surveys, deliveries), so that the client receives what it
    would receive.
    The model shown is written to by the next step.
    """
    other = twin(fed)
    other.engine = _Watching(fed, number, every, show)
    try:
        other.round([number, *(i for i in (range(fed.size) if clients is None else clients) if i != number)])
    except _Enough:
        return
