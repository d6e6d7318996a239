"""Many clients at once on one GPU.

Each slot has its own parameters, a stream and captured CUDA graphs of the step; a queue of clients passes through the slots,
longest first, so that clients of unequal size need no padding. A graph holds several steps, because launching is what small
models spend their time on; what is left over runs through graphs of fewer steps. Batches are gathered inside the graph from
data that already lie on the GPU, by a step counter on the device. Scoring and surveys spread clients over a few streams.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from .. import tree
from ..core.engine import ClientTask, Work
from ..core.federation import Federation
from ..core.part import Phase
from ..core.samples import steps_in
from ..core.slot import Slot
from ..core.step import Program
from ._shortage import out_of_memory, too_little
from ._sides import Sides

MOST_SLOTS = 20
BLOCKS = (8, 4, 1)  # steps in a graph; a schedule is cut into the largest that fit
TURN = 4            # graphs a slot launches before the next slot has its turn
WARM_UP = 2         # eager steps before a capture
_CAPTURING = threading.Lock()      # of all engines of the process: collection, which must rest meanwhile, is theirs in common


@dataclass
class _Lane:
    """A slot with its stream and its graphs."""

    slot: Slot
    stream: torch.cuda.Stream
    pool: Any
    graphs: dict[tuple[str, int, int], torch.cuda.CUDAGraph] = field(default_factory=dict)
    work: Work | None = None
    place: int = 0                                   # of its work among the works
    launches: deque[tuple[Phase, int, int]] = field(default_factory=deque)      # phase, batch size, steps


class Slots:
    """The engine. `most` bounds the number of slots; it halves when the GPU's memory does not suffice."""

    def __init__(self, program: Program, make_slot: Callable[[Work], Slot], most: int = MOST_SLOTS) -> None:
        self.program, self.make_slot, self.most, self._halvings = program, make_slot, most, most.bit_length()
        self.lanes: dict[str, list[_Lane]] = {}
        self.sides = Sides()
        self.captured = True                         # False once a step could not be captured
        self.notes: list[str] = []                   # what the record should say
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False

    @classmethod
    def of(cls, most: int) -> Any:
        """A factory of engines with at most so many slots."""
        return partial(cls, most=most)

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        queue = list(works)
        results: dict[int, Any] = {}
        while len(results) < len(queue):
            said: str | None = None
            try:
                self._work_off(queue, results)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                said = str(error).partition("\n")[0]
            if said is not None:                     # here, since the error held on to tensors of the frames it passed
                self._halve(queue[0].kind, min(self.most, len(queue) - len(results)), said)
        for place in range(len(queue)):
            yield results.pop(place)

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]:
        """The task for every client, on a few streams in turn: no client waits for another, and the host for none of them."""
        results: list[Any] | None = None
        if len(numbers) > 1 and not self.sides.asking:
            try:
                results = self.sides.ask(partial(task, fed), numbers, common, given)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
        if results is not None:
            yield from results
            return
        if len(numbers) > 1 and not self.sides.asking:    # several at once were too many: one by one, and in smaller batches
            fed.samples.several = 1
            torch.cuda.synchronize()
            with _CAPTURING:
                torch.cuda.empty_cache()
        for number, own in zip(numbers, given):
            yield self._ask_one(partial(task, fed, number, common, own))

    def _ask_one(self, ask: Callable[[], Any]) -> Any:
        """One client's answer; where memory does not suffice even so, with fewer slots beside it."""
        for before in count():
            try:
                return ask()
            except RuntimeError as error:
                if self.sides.asking or not out_of_memory(error):         # who asks several at once turns to one by one first
                    raise
                said = str(error).partition("\n")[0]
            self.make_room(said, before)

    def _work_off(self, queue: list[Work], results: dict[int, Any]) -> None:
        """All works that have no result yet pass through the slots, the longest first."""
        main = torch.cuda.current_stream()
        try:
            self._pass_through(queue, results, main)
        finally:
            torch.cuda.set_stream(main)              # set and not entered: a context takes ten times as long

    def _pass_through(self, queue: list[Work], results: dict[int, Any], main: torch.cuda.Stream) -> None:
        waiting = deque(sorted((i for i in range(len(queue)) if i not in results),
                               key=lambda i: -steps_in(queue[i].schedule)))
        lanes = self._lanes_for(queue[waiting[0]], len(waiting), main)
        try:
            self._take_turns(lanes, queue, waiting, results)
        finally:
            for lane in lanes:                       # a pass that broke off leaves nothing under way, and no client's state in memory
                lane.work = None
                lane.launches.clear()
        for lane in lanes:
            main.wait_stream(lane.stream)

    def _take_turns(self, lanes: list[_Lane], queue: list[Work], waiting: deque[int], results: dict[int, Any]) -> None:
        active = deque(lanes)
        while active:                                # a slot has its first steps before the next one is loaded
            lane = active.popleft()
            if lane.work is None and not self._next(lane, queue, waiting):
                continue
            self._launch(lane)
            if lane.launches:
                active.append(lane)
                continue
            assert lane.work is not None
            torch.cuda.set_stream(lane.stream)
            results[lane.place] = lane.work.finish(lane.slot)
            lane.work = None
            active.append(lane)

    # ---- slots -----------------------------------------------------------------------------------------------------

    def _lanes_for(self, work: Work, clients: int, main: torch.cuda.Stream) -> list[_Lane]:
        """As many slots as there are clients, up to the bound; every one ordered after what the main stream has done.

        A hook that trains while clients are asked does so on a side stream; what other such hooks were given may lie in memory that the
        slot is about to use again, so it waits for all side streams.
        """
        lanes = self.lanes.setdefault(work.kind, [])
        while len(lanes) < min(self.most, clients):
            lanes.append(_Lane(self.make_slot(work), torch.cuda.Stream(), torch.cuda.graph_pool_handle()))
        done = [stream.record_event() for stream in {main, *(self.sides.streams if self.sides.asking else ())}]
        for lane in lanes:
            for event in done:
                lane.stream.wait_event(event)
        return lanes[:clients]

    def lacks_memory(self, error: RuntimeError) -> bool:
        return out_of_memory(error)

    def make_room(self, said: str, before: int) -> None:
        """For what happens outside the slots, as when models are put together: half of the slots of the kind that has most; of equals
        the one that came last, for others may not come back. Those that do come back in every round are no way to make room.
        """
        if before > self._halvings:
            raise too_little(said)
        kind = max(reversed(self.lanes), key=lambda k: len(self.lanes[k]), default="")
        self._halve(kind, len(self.lanes.get(kind, [])), said)

    def _halve(self, kind: str, wanted: int, said: str) -> None:
        """The GPU's memory did not suffice for `wanted` slots: half of those there are, and the clients under way begin again.

        Draws are keyed, so nothing of the result changes. Slots of other kinds of work are given up whole; they come back when needed.
        Where this kind has less than two, their memory may be what it lacked, so the bound on slots stays as it is.
        """
        torch.cuda.synchronize()
        lanes = self.lanes.get(kind, [])
        if len(lanes) < 2 and any(own for other, own in self.lanes.items() if other != kind):
            note = "the GPU's memory did not suffice for the slots of two kinds of work"
        elif max(len(lanes), wanted) < 2:
            raise too_little(said)
        else:
            self.most = max(1, len(lanes) // 2)
            note = f"the GPU's memory sufficed for {self.most} slot{'s' if self.most > 1 else ''}"
        self.lanes = {kind: lanes[: self.most]}
        for lane in self.lanes[kind]:
            lane.work = None
            lane.launches.clear()
        lanes.clear()
        with _CAPTURING:                             # nothing may be collected while another device captures
            gc.collect()
            torch.cuda.empty_cache()
        if note not in self.notes:                   # two kinds of work may take each other's slots in every round
            self.notes.append(note)

    def _next(self, lane: _Lane, queue: list[Work], waiting: deque[int]) -> bool:
        """Load the next client into a free slot."""
        if not waiting:
            return False
        lane.place = waiting.popleft()
        work = lane.work = queue[lane.place]
        torch.cuda.set_stream(lane.stream)
        work.load(lane.slot)
        lane.launches = deque(blocks_of(work.schedule) if self.captured else [])
        if not self.captured:
            self._eagerly(lane)
        return True

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _launch(self, lane: _Lane) -> None:
        for _ in range(min(TURN, len(lane.launches))):
            phase, size, steps = lane.launches.popleft()
            graph = lane.graphs.get((phase.name, size, steps))
            if graph is None:
                try:
                    graph = lane.graphs[phase.name, size, steps] = self._capture(lane, phase, size, steps)
                except RuntimeError as error:
                    if out_of_memory(error):
                        raise
                    return self._give_up_capture(lane, error)
            torch.cuda.set_stream(lane.stream)
            graph.replay()

    def _capture(self, lane: _Lane, phase: Phase, size: int, steps: int) -> torch.cuda.CUDAGraph:
        """Record `steps` steps. What the warm-up wrote is undone; recording itself runs nothing."""
        slot = lane.slot
        with torch.cuda.stream(lane.stream):
            saved = tree.clone(slot.written())
            self.program.begin(slot, phase)
            slot.rehearse()
            for _ in range(WARM_UP):
                slot.counter.copy_(saved["counter"])     # always the same step: a later one may have another size, or not exist
                self.program.step(slot, phase, size)
            with torch.no_grad():
                tree.copy_into(slot.written(), saved)
            slot.reserve(steps)
        lane.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING:
            collecting = gc.isenabled()
            gc.disable()            # a graph of an earlier engine that dies during the capture would break it
            try:
                with torch.cuda.graph(graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"), \
                        self.program.recording(slot):
                    for _ in range(steps):
                        self.program.step(slot, phase, size)
            finally:
                if collecting:      # else the user's program wants it off
                    gc.enable()
        with torch.cuda.stream(lane.stream):
            slot.fill_tables()
        return graph

    def _give_up_capture(self, lane: _Lane, error: RuntimeError) -> None:
        """Some step cannot be captured: say so once, and run this client and all later ones step by step."""
        if self.captured:                            # else another slot, whose client was under way too, has said it
            self._say_not_captured(error)
        torch.cuda.synchronize()
        assert lane.work is not None
        with torch.cuda.stream(lane.stream):
            lane.work.load(lane.slot)                # from the start: draws are keyed, so nothing differs
        self._eagerly(lane)

    def _say_not_captured(self, error: RuntimeError) -> None:
        acting = {p.name for hooks in self.program.hooks.values() for parts in hooks.values() for p in parts}
        names = "+".join(sorted(acting)) or "the method"
        reason = str(error).partition("\n")[0] or type(error).__name__
        self.captured = False
        self.notes.append(f"steps are not captured: {reason}")
        warnings.warn(f"Steps of {names} cannot be captured in a CUDA graph ({reason}); they run one by one, slower.", stacklevel=2)

    def _eagerly(self, lane: _Lane) -> None:
        assert lane.work is not None
        lane.launches.clear()
        with torch.cuda.stream(lane.stream):
            for phase, sizes in lane.work.schedule:
                self.program.begin(lane.slot, phase)
                for size in sizes:
                    self.program.step(lane.slot, phase, size)


def blocks_of(schedule: list[tuple[Phase, list[int]]]) -> list[tuple[Phase, int, int]]:
    """A schedule as (phase, batch size, steps), with steps of equal size in blocks."""
    out: list[tuple[Phase, int, int]] = []
    for phase, sizes in schedule:
        start = 0
        while start < len(sizes):
            end = start
            while end < len(sizes) and sizes[end] == sizes[start]:
                end += 1
            left = end - start
            for block in BLOCKS:
                full, left = divmod(left, block)
                out += [(phase, sizes[start], block)] * full
            start = end
    return out
