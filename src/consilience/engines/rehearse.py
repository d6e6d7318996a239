"""How fast a GPU will be, found out by the first steps of clients that train beside each other.

A step by itself says little: its kernels wait for the host, and those of several clients overlap. So a few clients go through the run's
own engine, for some of their steps; nothing comes out of it, and what the engine captured it has no need to capture again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..core.client import LocalWork
from ..core.engine import Work
from ..core.federation import Federation
from ..core.samples import Schedule, steps_in
from ..core.slot import Slot

BESIDE = 32             # clients that take part, at most
FEW, MANY = 8, 64       # steps of each
LONG = 0.1              # seconds; few steps that take longer than this say enough


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of one step among others, and of all else that a client's visit takes; bytes that PyTorch holds of the GPU's memory."""

    step: float
    visit: float
    memory: int


class _Beginning:
    """A client's first steps."""

    def __init__(self, work: Work, steps: int) -> None:
        self.work, self.number, self.kind, self.schedule = work, work.number, work.kind, beginning(work.schedule, steps)

    def load(self, slot: Slot) -> None:
        self.work.load(slot)

    def finish(self, slot: Slot) -> Any:
        return None


def beginning(schedule: Schedule, steps: int) -> Schedule:
    """About so many steps, of each phase its share, in eights where there are as many: an engine that captures steps has those anyway."""
    share = steps / max(1, steps_in(schedule))
    out = []
    for phase, sizes in schedule:
        many = min(len(sizes), max(1, round(len(sizes) * share)))
        many = min(-(-many // FEW) * FEW, len(sizes) // FEW * FEW) or min(many, len(sizes))
        out.append((phase, sizes[:many]))
    return out


def work_of(fed: Federation, number: int) -> LocalWork:
    """A client's training as it would be in the next round."""
    return LocalWork(fed, number, fed.client(number), [number], fed.downloads(number))


def who_trains(fed: Federation) -> Iterator[int]:
    return (i for i in range(fed.size) if fed.trains(i))


def rehearse(fed: Federation) -> Rehearsal:
    """With the federation's engine. Changes nothing of its state."""
    works = [work_of(fed, i) for i in islice(who_trains(fed), min(BESIDE, fed.policy.cohort_size(fed.size)))]
    _pass(fed, works, FEW)                          # captures
    few, steps = _pass(fed, works, FEW)
    step = few / steps
    if few < LONG:
        many, more = _pass(fed, works, MANY)
        step = (many - few) / (more - steps) if more > steps and many > few else many / more
    held = torch.cuda.memory_reserved(fed.device) if fed.device.type == "cuda" else 0
    return Rehearsal(step, max(0.0, few - step * steps) / len(works), held)


def _pass(fed: Federation, works: list[LocalWork], steps: int) -> tuple[float, int]:
    """Seconds of all clients' beginnings, and their steps."""
    first = [_Beginning(w, steps) for w in works]
    _wait(fed)
    start = time.perf_counter()
    with torch.enable_grad():
        for _ in fed.engine.run(first):
            pass
    _wait(fed)
    return time.perf_counter() - start, sum(steps_in(w.schedule) for w in first)


def _wait(fed: Federation) -> None:
    if fed.device.type == "cuda":
        torch.cuda.synchronize(fed.device)
