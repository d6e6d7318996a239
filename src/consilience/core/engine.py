"""What a federation and its engine say to each other, and what a round reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .samples import Schedule
from .slot import Slot
from .step import Program

if TYPE_CHECKING:
    from .federation import Federation


class Work(Protocol):
    """What an engine runs: fill a slot, run the schedule's steps, say what came out."""

    number: int
    kind: str
    schedule: Schedule

    def load(self, slot: Slot) -> None: ...
    def finish(self, slot: Slot) -> Any: ...


class Engine(Protocol):
    """Where steps run. Results come in the order of the works; None for a client that was asked and did not answer."""

    def run(self, works: Iterable[Work]) -> Iterator[Any]: ...


ClientTask = Callable[["Federation", int, Any, Any], Any]


@runtime_checkable
class MappingEngine(Protocol):
    """An engine that can also run a task for each of many clients; None where one did not answer."""

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]: ...


@runtime_checkable
class RoomyEngine(Protocol):
    """An engine that holds a device's memory and can do with less of it."""

    def lacks_memory(self, error: RuntimeError) -> bool:
        """Whether this is how memory that ran out shows."""

    def make_room(self, said: str, before: int) -> None:
        """Give memory up, as was done so many times `before` for the same round; an error for the user where none is left to give."""


class Unanswered(Exception):
    """Clients did not answer what they were asked before training. The round begins again without them."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)
        super().__init__(f"no answer from {sorted(self.numbers)}")


class EngineFactory(Protocol):
    def __call__(self, program: Program, make_slot: Any) -> Engine: ...


@dataclass
class RoundReport:
    """What a round was, in numbers."""

    number: int
    cohort: list[int]                      # clients selected
    lost: list[int] = field(default_factory=list)      # selected, but failed before they uploaded
    idle: list[int] = field(default_factory=list)      # selected, but made no step
    exchanged: bool = True                 # models travelled
    losses: dict[int, float] = field(default_factory=dict)   # client -> mean training loss
    bytes_up: int = 0
    bytes_down: int = 0
    releases: dict[str, list[int]] = field(default_factory=dict)     # what was uploaded at once -> the clients whose uploads counted
    asked: dict[str, list[int]] = field(default_factory=dict)        # the same -> who was asked for it, where that is not the cohort
    privacy: dict[str, Any] = field(default_factory=dict)    # what all uploads so far may have told, where a part counts it
