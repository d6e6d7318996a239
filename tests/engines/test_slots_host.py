"""What the slots engine does on the host, with streams and graphs that do nothing: queue, launches and results are those of one
client after another, bit for bit, and the current stream is the caller's again afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consilience.engines.sequential import Sequential
from consilience.engines.slots import SIDES, Slots
from consilience.metrics.accuracy import score_global, score_personal
from consilience.parts import PARTS
from consilience.testing import largest_difference, run_tiny, trial


class IdleStream:
    def record_event(self) -> None: ...
    def wait_event(self, event: None) -> None: ...
    def wait_stream(self, other: IdleStream) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current stream, and every stream that was it."""
    main = IdleStream()
    seen = SimpleNamespace(main=main, now=main, used=set())

    def turn_to(stream: IdleStream) -> None:
        seen.now = stream
        seen.used.add(stream)

    @contextlib.contextmanager
    def inside(stream: IdleStream) -> Iterator[None]:
        before = seen.now
        turn_to(stream)
        yield
        turn_to(before)

    def replayed(self: Slots, lane: Any, phase: Any, size: int, steps: int) -> Any:
        def replay() -> None:
            self.program.begin(lane.slot, phase)
            for _ in range(steps):
                self.program.step(lane.slot, phase, size)
        return SimpleNamespace(replay=replay)

    for name, stand_in in {"current_stream": lambda: seen.now, "set_stream": turn_to, "Stream": IdleStream, "stream": inside,
                           "graph_pool_handle": lambda: None, "synchronize": lambda: None, "empty_cache": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Slots, "_capture", replayed)
    return seen


@pytest.mark.parametrize("name", ["scaffold", "ditto", "babu", "anchors", "prbm", "fomo"])
def test_rounds_and_scores(seen: SimpleNamespace, name: str) -> None:
    """Parts that keep, survey, prepare, train for themselves and personalise."""
    one, many = (run_tiny([trial(PARTS[name])], rounds=2, engine=engine) for engine in (Sequential, Slots.of(3)))
    assert largest_difference(one, many) == 0
    rows = [one.samples.rows[i].train for i in range(len(one.samples))]
    names = [str(i) for i in range(len(rows))]
    for score in (score_global, score_personal):
        assert score(one, rows, names) == score(many, rows, names)
    assert seen.now is seen.main


def test_clients_are_asked_on_several_streams(seen: SimpleNamespace) -> None:
    fed = run_tiny([], rounds=1, engine=Slots)
    seen.used.clear()
    where = list(fed.each(lambda fed, number, common, own: (number, common, own, seen.now), range(6), "c", "abcdef"))
    assert [w[:3] for w in where] == [(i, "c", x) for i, x in enumerate("abcdef")]
    assert len({w[3] for w in where}) == SIDES
    assert seen.now is seen.main


def test_when_memory_runs_out_clients_are_asked_one_by_one(seen: SimpleNamespace) -> None:
    fed = run_tiny([], rounds=1, engine=Slots)
    asked = []

    def ask(fed: Any, number: int, common: Any, own: Any) -> int:
        asked.append((number, seen.now is seen.main))
        if seen.now is not seen.main and number == 2:
            raise torch.cuda.OutOfMemoryError("too much")
        return 10 * number

    assert list(fed.each(ask, range(4))) == [0, 10, 20, 30]
    assert asked[-4:] == [(i, True) for i in range(4)]

    def fail(fed: Any, number: int, common: Any, own: Any) -> int:
        raise RuntimeError("a mistake of the task")

    with pytest.raises(RuntimeError, match="a mistake"):
        list(fed.each(fail, range(4)))
    assert seen.now is seen.main
