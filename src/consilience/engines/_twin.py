"""A twin: a second federation of the same method on the same data, that does clients' work for the first one.

It stands on another device, in another process or on another machine. It is told the server's state with every call and a client's
state with that client's work, and it keeps neither.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.assemble import assemble
from ..core.client import ClientState, LocalWork
from ..core.engine import EngineFactory, Work
from ..core.federation import Federation
from ..core.population import Population
from ..core.store import ClientStore, MemoryStore

STATE = ("model", "shared", "round_number", "last_exchange")      # of the server, as far as clients see it


def plan_of(fed: Federation) -> tuple[Any, ...]:
    """What a twin elsewhere is built from. Clients' names are of no use there, and there may be a hundred thousand."""
    module, layout, method, population, policy = fed.made_of
    bare = Population(population.x, population.y, population.table, population.classes, population.transform, (), population.proxy,
                      population.task)
    return module, layout, method, bare, policy


def server_state(fed: Federation) -> dict[str, Any]:
    return {name: getattr(fed, name) for name in STATE}


def build_twin(plan: tuple[Any, ...], engine: EngineFactory, device: str | torch.device = "cpu",
               store: Callable[[ClientState], ClientStore] | None = None) -> Federation:
    """A federation that only does what it is told."""
    module, layout, method, population, policy = plan
    fed = Federation(module, layout, method, population, policy, engine, device, store or Guests)
    fed.prepared = True
    return fed


def twin_beside(fed: Federation, engine: EngineFactory, store: Callable[[ClientState], ClientStore]) -> Federation:
    """A twin on the same device: it shares the samples there, but has a network of its own, since a network runs one model at a time."""
    module, layout, method, population, _ = fed.made_of
    twin = copy.copy(fed)
    twin.program, twin.phases, twin.plain_phase = assemble(module, layout, method, fed.policy, population, fed.device, fed.size)
    twin.spec = twin.program.spec
    twin.engine, twin.clients, twin.prepared = engine(twin.program, twin.make_slot), store(fed.clients.fresh), True
    twin.on_client = lambda done, of: None
    return twin


def for_twins(works: Sequence[Work]) -> list[LocalWork]:
    """The works, where each is a client's round and nothing more, so that a twin can make it anew; else none of them: they are run here."""
    ours = [w for w in works if type(w) is LocalWork]        # a twin would leave out what a subclass does
    return ours if len(ours) == len(works) else []


def moved(value: Any, device: torch.device, whole: bool = False) -> Any:
    """The same value with its tensors on the device; what lies there already is not copied.

    From one GPU to another goes what lies on a GPU; what lies on the host stays there, as on a single device. With `whole` everything goes.
    """
    if isinstance(value, Tensor):
        return value.to(device) if whole or value.device.type == device.type else value
    if isinstance(value, dict):
        return {k: moved(v, device, whole) for k, v in value.items()}
    if isinstance(value, ClientState):
        return replace(value, tensors=moved(value.tensors, device, whole))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(v, device, whole) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device, whole) for v in value)
    return value


class Guests(MemoryStore):
    """Holds the states of the clients at work and of nobody else."""

    def host(self, states: Mapping[int, ClientState]) -> None:
        self._pending, self._states = {}, dict(states)


class Mirror(ClientStore):
    """Another federation's clients, seen from another device. Reads only; one at a time, for a store need not bear more."""

    def __init__(self, fresh: ClientState, device: torch.device, lock: threading.Lock) -> None:
        super().__init__(fresh)
        self.device, self.lock = device, lock
        self.source: ClientStore | None = None

    def _read(self, number: int) -> ClientState:
        if self.source is None:
            return self.fresh
        with self.lock:
            state = self.source.get(number)
        return self.fresh if state is self.source.fresh else moved(state, self.device)

    def _write(self, states: Mapping[int, ClientState]) -> None:
        raise NotImplementedError("a twin's clients belong to the federation it works for")

    def _numbers(self) -> Iterator[int]:
        return iter(())

    def _forget(self) -> None:
        raise NotImplementedError("a twin's clients belong to the federation it works for")
