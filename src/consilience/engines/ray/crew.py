"""The workers of a run on a cluster: started, given work, replaced when they or their machines are lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ...errors import ConfigError
from .._plain import rebuild_error
from .._pool import MOST_ATTEMPTS, Content, WorkerError, raise_from_worker
from ..devices import share_out
from .actor import Worker, versions
from .cluster import Cluster, Plan
from .packing import pack, unpack

AHEAD = 2               # chunks a worker holds: one at work, one waiting
PATIENCE = 120.0        # seconds until a cluster without room for a single worker is given up


class _Hand:
    """One worker as the engine sees it."""

    def __init__(self, plan: Plan) -> None:
        worker: Any = Worker
        self.actor = ray.remote(worker).options(num_cpus=1, num_gpus=int(plan.on_gpu), max_restarts=0).remote(plan.device)
        self.greeting = self.actor.hello.remote()
        self.ready = False
        self.knows: tuple[int, int] = (-1, -1)            # federation built, call set up
        self.chunks: dict[Any, int] = {}                  # reference to an answer -> the chunk's number

    def bury(self) -> None:
        if ray.is_initialized():                          # else it is gone already
            ray.kill(self.actor, no_restart=True)


def _answered(hand: _Hand) -> Iterator[tuple[int, Any]]:
    """What a lost worker had ended before: not to be done again, and not to blame."""
    for ref in list(hand.chunks):
        try:
            answer = ray.get(ref, timeout=0)
        except RayError:
            continue
        yield hand.chunks.pop(ref), answer


class Crew:
    """Workers that can serve one federation after another. Nothing is started before the first call."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster, self.plan = cluster, plan
        self.hands: list[_Hand] = []
        self.restarts = 0                                 # workers that were lost and replaced
        self.heard: dict[str, None] = {}                  # notes of the workers' engines
        self.machines: set[str] = set()                   # on which workers have been
        self._plan_ref: Any = None
        self._built = -1                                  # whose federation the workers are to know
        self._call = 0

    def close(self) -> None:
        """End the workers: at the end, and where what they still do is of no use to anyone."""
        for hand in self.hands:
            hand.bury()
        self.hands, self._plan_ref, self._built = [], None, -1

    def run(self, owner: int, plan: Callable[[], Any], setting: Any, costs: Sequence[float], content: Content) -> Iterator[Any]:
        """Results in the order of tasks. `plan` is what to build for this owner, `setting` what the tasks share."""
        if self._built != owner:
            self._plan_ref, self._built = ray.put(pack(plan())), owner
        self._call += 1
        # A GPU takes its whole share at once, to fill its slots; cores take one client after another, the longest first.
        chunks = [c for c in share_out(costs, self.plan.workers) if c] if self.plan.on_gpu else \
            [[i] for i in sorted(range(len(costs)), key=lambda i: -costs[i])]
        given = 0
        try:
            for result in self._serve(ray.put(pack(setting)), chunks, len(costs), content):
                given += 1
                yield result
        finally:
            if given < len(costs):
                self.close()

    def _serve(self, setting: Any, chunks: list[list[int]], count: int, content: Content) -> Iterator[Any]:
        waiting, attempts = deque(range(len(chunks))), [0] * len(chunks)
        results: dict[int, Any] = {}
        given, since, unstarted = 0, time.monotonic(), 0
        while given < count:
            self._feed(setting, waiting, lambda number: [content(i) for i in chunks[number]])
            whose = {ref: hand for hand in self.hands for ref in (hand.chunks if hand.ready else (hand.greeting,))}
            for ref in ray.wait(list(whose), num_returns=1, timeout=1.0)[0]:        # so that Ctrl-C is heard
                hand = whose[ref]
                try:
                    answer = ray.get(ref)
                except RayTaskError as error:                   # not of a client's work, which says so itself: of Ray's or of what it sent
                    raise WorkerError(f"A Ray worker failed: {error}") from error
                except RayError as error:
                    unstarted = 0 if hand.ready else unstarted + 1
                    for number, answer in _answered(hand):
                        results.update(self._taken(chunks[number], answer))
                    self._lost(hand, waiting, attempts, unstarted, error)
                    continue
                if ref == hand.greeting:
                    self._greet(hand, *answer)
                    continue
                results.update(self._taken(chunks[hand.chunks.pop(ref)], answer))
            if not any(hand.ready for hand in self.hands) and time.monotonic() - since > PATIENCE:
                raise ConfigError(f"No worker could be started in {PATIENCE:.0f} s on {self.cluster.described()}: is all of it in use?")
            while given in results:
                yield results.pop(given)
                given += 1

    def _taken(self, chunk: list[int], answer: Any) -> Iterator[tuple[int, Any]]:
        """The tasks of a chunk with their results. An error of a task is raised here."""
        if answer[0] == "failed":
            raise_from_worker(rebuild_error(answer[1]), answer[2])
        self.heard.update(dict.fromkeys(answer[2]))
        return zip(chunk, unpack(answer[1], copy=True))

    def _feed(self, setting: Any, waiting: deque[int], content: Callable[[int], Any]) -> None:
        """Hand chunks to whoever has room, the least loaded first."""
        while len(self.hands) < self.plan.workers:
            self.hands.append(_Hand(self.plan))
        for load in range(1 if self.plan.on_gpu else AHEAD):
            for hand in self.hands:
                if waiting and hand.ready and len(hand.chunks) == load:
                    self._prepare(hand, setting)
                    number = waiting.popleft()
                    hand.chunks[hand.actor.work.remote(pack(content(number)))] = number

    def _prepare(self, hand: _Hand, setting: Any) -> None:
        if hand.knows[0] != self._built:
            hand.actor.build.remote(self._plan_ref)
        if hand.knows != (self._built, self._call):
            hand.actor.set_up.remote(setting)
        hand.knows = (self._built, self._call)

    def _greet(self, hand: _Hand, theirs: dict[str, str], host: str, machine: str) -> None:
        unlike = [f"{k} {v} here and {theirs.get(k)} there" for k, v in versions().items() if theirs.get(k) != v]
        if unlike:
            raise ConfigError(f"The Ray cluster's machine {host!r} has other versions: {', '.join(unlike)}. Install the same ones.")
        hand.ready = True
        self.machines.add(machine)

    def _lost(self, hand: _Hand, waiting: deque[int], attempts: list[int], unstarted: int, error: RayError) -> None:
        """A worker or its machine is gone: others do again what it held. Draws are keyed, so nothing else changes."""
        self.hands.remove(hand)
        hand.bury()
        if unstarted >= 3:
            raise WorkerError(f"Ray workers end before they are ready: {' '.join(str(error).split())[:300]}")
        numbers = list(hand.chunks.values())
        waiting.extendleft(reversed(numbers))
        for number in numbers[:1]:                              # the one it was at
            attempts[number] += 1
            if attempts[number] >= MOST_ATTEMPTS:
                raise WorkerError(f"The same work ended {MOST_ATTEMPTS} Ray workers, perhaps for want of memory. Use a smaller batch.")
        self.restarts += hand.ready
