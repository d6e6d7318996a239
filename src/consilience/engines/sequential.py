"""One client after another, one step after another: the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core.engine import Work
from ..core.slot import Slot
from ..core.step import Program


class Sequential:
    """Keeps one slot for each kind of work and passes every client through it."""

    def __init__(self, program: Program, make_slot: Callable[[Work], Slot]) -> None:
        self.program, self.make_slot = program, make_slot
        self.slots: dict[str, Slot] = {}

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        for work in works:
            if work.kind not in self.slots:
                self.slots[work.kind] = self.make_slot(work)
            slot = self.slots[work.kind]
            work.load(slot)
            for phase, sizes in work.schedule:
                self.program.begin(slot, phase)
                self.steps(slot, phase, sizes)
            yield work.finish(slot)

    def steps(self, slot: Slot, phase: Any, sizes: list[int]) -> None:
        for size in sizes:
            self.program.step(slot, phase, size)
