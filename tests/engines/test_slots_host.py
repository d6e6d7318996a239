"""What the slots engine does on the host, with streams and graphs that do nothing: queue, launches and results are those of one
client after another, bit for bit, and the current stream is the caller's again afterwards.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consilience.core import round as playing
from consilience.core.client import ClientView, LocalWork
from consilience.core.part import Part
from consilience.engines import slots
from consilience.engines._shortage import out_of_memory
from consilience.engines._sides import SIDES
from consilience.engines.devices import Devices
from consilience.engines.sequential import Sequential
from consilience.engines.slots import Slots
from consilience.errors import ConfigError
from consilience.metrics.accuracy import score_global, score_personal
from consilience.parts import PARTS
from consilience.testing import SIZES, largest_difference, run_tiny, tiny_federation, trial

CAPTURE = Slots._capture


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


@pytest.mark.parametrize("name", ["scaffold", "ditto", "babu", "anchors", "prbm", "fomo", "proto", "moreau", "apple"])
def test_rounds_and_scores(seen: SimpleNamespace, name: str) -> None:
    """Parts that keep, survey, prepare, train for themselves and personalise."""
    one, many = (run_tiny([trial(PARTS[name])], rounds=2, engine=engine) for engine in (Sequential, Slots.of(3)))
    assert largest_difference(one, many) == 0
    rows = [one.samples.rows[i].train for i in range(len(one.samples))]
    names = [str(i) for i in range(len(rows))]
    for score in (score_global, score_personal):
        assert score(one, rows, names) == score(many, rows, names)
    assert seen.now is seen.main


@pytest.mark.parametrize("most", [2, 3, 8])
def test_clients_with_few_steps_spread_over_the_slots(seen: SimpleNamespace, most: int) -> None:
    """A client whose steps are all launched at once leaves its slot free, but the next client goes to a slot that has had none."""
    fed = run_tiny([], rounds=1, engine=Slots.of(most), sizes=(24, 17, 30, 40, 26, 33))
    lanes, = fed.engine.lanes.values()
    assert len(lanes) == min(most, len(fed.samples))
    assert all(lane.graphs for lane in lanes)


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


SAID = ["CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"]


@pytest.mark.parametrize("said", SAID)
def test_libraries_say_in_their_own_words_that_memory_ran_out(said: str) -> None:
    for kind in (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)):
        assert out_of_memory(kind(said))
    on_top, cause = RuntimeError("the capture could not be ended"), RuntimeError(said)
    on_top.__context__ = cause
    assert out_of_memory(on_top)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError(SAID[0]), None,
                                   RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
                                   RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")])
def test_other_mistakes_are_not_taken_for_it(error: Exception | None) -> None:
    assert not out_of_memory(error)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, holds: int, error: Exception) -> None:
    """A GPU with memory for so many slots, of all kinds together."""
    make = Slots._lanes_for

    def lanes_for(self: Slots, work: Any, clients: int, main: Any) -> Any:
        made = self.make_slot

        def one_more(work: Any) -> Any:
            if sum(map(len, self.lanes.values())) >= holds:
                raise error
            return made(work)
        self.make_slot = one_more
        try:
            return make(self, work, clients, main)
        finally:
            self.make_slot = made
    monkeypatch.setattr(Slots, "_lanes_for", lanes_for)


@pytest.mark.parametrize("holds", [2, 1])
def test_slots_that_do_not_fit_are_given_up(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, holds: int) -> None:
    """Of three clients that train, two or one find memory: the round goes on with one slot."""
    whole = run_tiny([], rounds=2)
    short_of_memory(monkeypatch, holds, RuntimeError(SAID[0]))
    fed = run_tiny([], rounds=2, engine=Slots.of(8))
    assert largest_difference(whole, fed) == 0
    assert fed.engine.most == 1
    assert fed.engine.notes == ["the GPU's memory sufficed for 1 slot"]


def test_no_memory_for_one_client(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of_memory(monkeypatch, 0, RuntimeError(SAID[0]))
    with pytest.raises(ConfigError, match=r"train one client \(CUDA error: out of memory\)\. Use a smaller batch"):
        run_tiny([], rounds=1, engine=Slots.of(8))


@pytest.mark.parametrize("where", ["new_model", "refuse_nonfinite"])
def test_memory_that_runs_out_beside_the_slots(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As when models are put together: the round is played again with half of the slots, and nothing of it counts twice."""
    whole = run_tiny([trial(PARTS["scaffold"])], rounds=2)
    fails = iter([True])
    real = getattr(playing, where)

    def short(*given: Any) -> Any:
        if next(fails, False):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore words.")
        return real(*given)
    monkeypatch.setattr(playing, where, short)
    fed = run_tiny([trial(PARTS["scaffold"])], rounds=2, engine=Slots.of(8), sizes=SIZES)
    assert largest_difference(whole, fed) == 0
    assert fed.round_number == 2
    assert fed.engine.most == 1
    assert fed.engine.notes[-1] == "the GPU's memory sufficed for 1 slot"


def test_memory_that_runs_out_while_clients_are_scored(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """First all at once, then one by one beside three slots: the slots are halved, and the scores are those of a run with memory."""
    one, fed = (run_tiny([trial(PARTS["ditto"])], rounds=1, engine=engine) for engine in (Sequential, Slots.of(8)))
    rows, names = [one.samples.rows[i].train for i in range(4)], list("abcd")
    wanted, real, slots_beside = score_personal(one, rows, names), fed.samples.inputs, []

    def short(*given: Any) -> Any:
        slots_beside.append(len(fed.engine.lanes["round"]))
        if slots_beside[-1] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore words.")
        return real(*given)
    monkeypatch.setattr(fed.samples, "inputs", short)
    assert score_personal(fed, rows, names) == wanted
    assert slots_beside[:3] == [3, 3, 1]
    assert fed.engine.notes == ["the GPU's memory sufficed for 1 slot"]
    monkeypatch.setattr(fed.samples, "inputs", lambda *given: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(ConfigError, match="eval_batch"):
        score_personal(fed, rows, names)


def test_memory_that_runs_out_where_several_devices_send_their_results(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fails, real = run_tiny([], rounds=2), iter([True]), playing.new_model

    def short(*given: Any) -> Any:
        if next(fails, False):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return real(*given)
    monkeypatch.setattr(playing, "new_model", short)
    fed = run_tiny([], rounds=2, engine=Devices.on(["cpu"], Slots.of(8)))
    assert largest_difference(whole, fed) == 0
    assert fed.engine.notes == ["cpu: the GPU's memory sufficed for 1 slot"]
    fed.engine.close()


def always(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Models can never be put together; a list of the times it was tried, which ends."""
    tried: list[int] = []

    def short(*given: Any) -> Any:
        tried.append(1)
        assert len(tried) < 20, "for ever"
        raise error
    monkeypatch.setattr(playing, "new_model", short)
    return tried


def test_where_there_is_no_room_to_make(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(playing, "new_model", short)
    fed = tiny_federation(engine=Slots.of(8))
    with pytest.raises(ConfigError, match=r"CUDA out of memory.*participation"):
        fed.round()
    assert fed.round_number == 0


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError(), torch.cuda.OutOfMemoryError("\nCUDA out of memory.")])
def test_memory_that_runs_out_without_a_word(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tried = always(monkeypatch, error)
    with pytest.raises(ConfigError, match="does not suffice"):
        tiny_federation(engine=Slots.of(8)).round()
    assert len(tried) == 2                          # with three slots and with one


class Surveyed(Part):
    """Every client trains a little for itself before the round, so that every round has two kinds of work."""

    name, reduce = "surveyed", {"mean": "mean"}

    def survey(self, c: ClientView) -> dict[str, Any]:
        return {"mean": torch.stack([w.mean() for w in c.train(c.received)["params"].values()]).mean()}


@pytest.mark.parametrize(("part", "times"), [(trial(PARTS["mr"]), 2), (Surveyed(), 3)], ids=["before the first round", "in every round"])
def test_giving_up_slots_that_come_back_makes_no_room(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, part: Part,
                                                      times: int) -> None:
    """One slot for each of two kinds of work, and memory that never suffices: the round must not be played again for ever."""
    tried = always(monkeypatch, torch.cuda.OutOfMemoryError("CUDA out of memory."))
    fed = tiny_federation([part], engine=Slots.of(1))
    with pytest.raises(ConfigError, match="does not suffice"):
        fed.round()
    assert len(tried) == times
    assert fed.round_number == 0


def test_a_gpu_that_is_named_twice_gives_up_slots_of_both(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its engines has one client, the longest, and no slot to give."""
    sizes = (80, 17, 18, 19)
    whole, fails, real = run_tiny([], rounds=1, sizes=sizes), iter([True]), playing.new_model

    def short(*given: Any) -> Any:
        if next(fails, False):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return real(*given)
    monkeypatch.setattr(playing, "new_model", short)
    fed = run_tiny([], rounds=1, sizes=sizes, engine=Devices.on(["cpu", "cpu"], Slots.of(8)))
    assert largest_difference(whole, fed) == 0
    assert [twin.engine.most for twin in fed.engine.twins] == [8, 1]
    fed.engine.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_round_that_breaks_leaves_nothing_under_way(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    """Neither in the slots that the next round uses nor in others: a client's work holds its whole state."""
    whole, fed = (tiny_federation(engine=engine, batch=2) for engine in (Sequential, Slots.of(8)))
    real, finished = LocalWork.finish, []

    def broken(work: LocalWork, slot: Any) -> Any:
        finished.append(work.number)
        if len(finished) == 2:
            raise error
        return real(work, slot)
    with monkeypatch.context() as patch:
        patch.setattr(LocalWork, "finish", broken)
        with pytest.raises(error):
            fed.round()
    lanes, = fed.engine.lanes.values()
    assert len(lanes) > 2
    assert all(lane.work is None and not lane.launches for lane in lanes)
    for cohort in ([0, 1], None):
        whole.round(cohort)
        fed.round(cohort)
    assert largest_difference(whole, fed) == 0


def test_clients_under_way_say_only_once_that_steps_are_not_captured(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first phase can be captured and is under way in every slot when the second turns out not to be."""
    recorded = Slots._capture

    def refused(self: Slots, lane: Any, phase: Any, size: int, steps: int) -> Any:
        if phase.name == "base":
            raise RuntimeError
        return recorded(self, lane, phase, size, steps)
    monkeypatch.setattr(Slots, "_capture", refused)
    monkeypatch.setattr(slots, "TURN", 1)
    part = trial(PARTS["rep"])
    with pytest.warns(UserWarning, match="cannot be captured") as warned:
        fed = run_tiny([part], rounds=1, batch=2, engine=Slots.of(8))
    assert len(warned) == 1
    assert fed.engine.notes == ["steps are not captured: RuntimeError"]
    assert largest_difference(run_tiny([part], rounds=1, batch=2), fed) == 0


def test_parts_whose_steps_are_not_captured_are_named_once(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that act in steps, by whatever hook and in however many phases: FedRep has two."""
    def refused(*given: Any) -> Any:
        raise RuntimeError("no")
    monkeypatch.setattr(Slots, "_capture", refused)
    with pytest.warns(UserWarning, match=r"Steps of mixup\+prox cannot be captured in a CUDA graph \(no\)"):
        run_tiny([trial(PARTS[name]) for name in ("rep", "prox", "mixup", "avgm")], rounds=1, engine=Slots.of(8))


def test_another_mistake_beside_the_slots_is_not_tried_again(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def broken(*given: Any) -> Any:
        tried.append(1)
        raise RuntimeError("a mistake")
    monkeypatch.setattr(playing, "new_model", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        tiny_federation(engine=Slots.of(8)).round()
    assert tried == [1]


def test_work_for_one_client_does_not_cost_the_others_their_slots(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of work has no slot yet, another fills the memory: those are given up, and come back in the next round."""
    fed = run_tiny([], rounds=1, engine=Slots.of(8))
    twin = run_tiny([], rounds=1)
    engine = fed.engine
    (kind, lanes), = engine.lanes.items()
    filled = len(lanes)
    assert filled > 2
    short_of_memory(monkeypatch, filled, torch.cuda.OutOfMemoryError("CUDA out of memory."))
    for f in (fed, twin):
        f.train_plainly(0, f.client(0), f.model, 1)
    assert engine.most == 8
    assert [len(own) for other, own in engine.lanes.items() if other != kind] == [1]
    assert not engine.lanes.get(kind)
    assert engine.notes == ["the GPU's memory did not suffice for the slots of two kinds of work"]
    for f in (fed, twin):
        f.round()
    assert largest_difference(twin, fed) == 0


def test_what_happens_in_every_round_is_noted_once(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for one slot, and two kinds of work: they take it from each other, round by round."""
    short_of_memory(monkeypatch, 1, RuntimeError(SAID[0]))
    fed = tiny_federation(engine=Slots.of(1))
    for _ in range(3):
        fed.round()
        fed.train_plainly(0, fed.client(0), fed.model, 1)
    assert fed.engine.notes == ["the GPU's memory did not suffice for the slots of two kinds of work"]


@pytest.mark.parametrize("collecting", [True, False])
def test_a_capture_leaves_garbage_collection_as_the_program_has_it(seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
                                                                  collecting: bool) -> None:
    during: list[bool] = []

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        during.append(gc.isenabled())
        yield
    monkeypatch.setattr(Slots, "_capture", CAPTURE)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        run_tiny([], rounds=1, engine=Slots)
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()
    assert during
    assert not any(during)
