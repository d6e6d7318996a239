"""One client's round, opened: its steps can be taken one at a time and looked into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from consilience import tree
from consilience.core import optimiser
from consilience.core.client import LocalWork, Outcome
from consilience.core.engine import RoundReport
from consilience.core.federation import Federation
from consilience.core.part import Part, Phase
from consilience.core.slot import Slot
from consilience.core.step import Step
from consilience.testing import NoHostSync, ReplayedSequential, differences, run_tiny, state_of, tiny_federation

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}      # params move by exactly −0.1·gradient


@dataclass
class Taken:
    """What one step did. `before` and `after` are copies of what the slot held around it."""

    step: Step
    phase: Phase
    before: dict[str, Any]            # model, personal, scratch
    after: dict[str, Any]
    grads: dict[str, Tensor]          # as the optimiser received them: after `gradient` and `grad`, before weight decay
    own_grads: list[Tensor]           # of personal tensors

    @property
    def terms(self) -> dict[str, Any]:
        """part -> its added term of the loss; the main term, whoever defines it, is under "task"."""
        (_, main), *added = [(name, t.detach() if torch.is_tensor(t) else t) for name, t in self.step.first.terms]
        return {"task": main, **dict(added)}

    @property
    def loss(self) -> Tensor:
        assert self.step.result is not None
        return self.step.result[0]

    @property
    def trace(self) -> Any:
        return self.step.first.trace

    @property
    def batch(self) -> Any:
        return self.step.first.batch

    def moved(self, key: str) -> Tensor:
        """How far the step moved one parameter."""
        return self.after["model"]["params"][key] - self.before["model"]["params"][key]


class OpenRound:
    """The next round of a federation up to one client's training; then `step()` by `step()`, then `finish()`."""

    def __init__(self, fed: Federation, number: int = 0) -> None:
        fed.prepare()
        fed.round_number += 1
        ids = [i for i in range(fed.size) if fed.trains(i)]
        with torch.no_grad():
            fed.ask_clients("survey", ids, RoundReport(fed.round_number, ids))
            down = {p.name: p.deliver(fed.serve(p, "deliver", ids), number) for p in fed.method.using("deliver")}
        self.fed, self.work = fed, LocalWork(fed, number, fed.client(number), ids, down)
        self.slot: Slot = fed.make_slot(self.work)
        self.work.load(self.slot)
        self._todo = [(phase, size) for phase, sizes in self.work.schedule for size in sizes]
        self._begun: Phase | None = None

    def _now(self) -> dict[str, Any]:
        return tree.clone({home: getattr(self.slot, home) for home in ("model", "personal", "scratch")})

    def step(self) -> Taken:
        (phase, size), *self._todo = self._todo
        if phase is not self._begun:
            self.fed.program.begin(self.slot, phase)
            self._begun = phase
        before, seen = self._now(), {}
        real = optimiser.update

        def update(policy: Any, params: Any, grads: Any, *more: Any) -> None:
            if policy is self.fed.program.policy:               # not a part's own step
                seen.update({k: g.detach().clone() for k, g in grads.items()})
            real(policy, params, grads, *more)
        with mock.patch.object(optimiser, "update", update):
            step = self.fed.program.step(self.slot, phase, size)
        return Taken(step, phase, before, self._now(), seen, [g.detach().clone() for g in step.own_grads])

    def rest(self) -> list[Taken]:
        return [self.step() for _ in range(len(self._todo))]

    def finish(self) -> Outcome:
        with torch.no_grad():
            return self.work.finish(self.slot)


@pytest.fixture
def open_round() -> Callable[..., OpenRound]:
    """open_round(part, …, number=0, rounds_before=0, **how): how goes to tiny_federation; plain SGD unless it says more."""
    def opened(*parts: Part, number: int = 0, rounds_before: int = 0, fed: Federation | None = None, **how: Any) -> OpenRound:
        if fed is None:
            fed = tiny_federation(parts, **(PLAIN | how))
            for _ in range(rounds_before):
                fed.round()
        return OpenRound(fed, number)
    return opened


class _WatchedReplay(ReplayedSequential):
    def steps(self, slot: Slot, phase: Any, sizes: list[int]) -> None:
        with NoHostSync():
            super().steps(slot, phase, sizes)


@pytest.fixture
def trains_and_replays() -> Callable[..., None]:
    """trains_and_replays(part): two rounds are finite, steps never call back to the host, and a recorded step can be repeated."""
    def check(part: Part) -> None:
        how = {"sizes": (16, 9, 5)}                             # four steps, two steps, none
        fed = run_tiny([part], **how)
        bad = [k for k, t in state_of(fed).items() if t.is_floating_point() and not t.isfinite().all()]
        assert not bad
        assert not differences(fed, run_tiny([part], engine=_WatchedReplay, **how))
    return check
