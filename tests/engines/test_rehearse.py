"""The first steps of clients that train beside each other, on a GPU before a run starts; here on the CPU's engines too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consilience.core.part import Phase
from consilience.engines import estimate, rehearse
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError
from consilience.parts.mr import Mr
from consilience.parts.rep import Rep
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny, state_of, tiny_federation

BODY, HEAD = Phase("body", ()), Phase("head", ())


@pytest.mark.parametrize(("lengths", "steps", "taken"), [
    ((100,), 8, (8,)), ((100,), 64, (64,)), ((20,), 64, (16,)), ((5,), 8, (5,)), ((5,), 64, (5,)),
    ((30, 90), 8, (8, 8)),              # 8/120 of 30 are 2, of 90 are 6: both are made 8
    ((30, 90), 64, (16, 48)),           # 64/120 of 30 are 16, of 90 are 48
    ((3, 97), 8, (1, 8)),               # 8/100 of 3 are 0.24: one
])
def test_which_steps(lengths: tuple[int, ...], steps: int, taken: tuple[int, ...]) -> None:
    schedule = [(phase, [10] * n) for phase, n in zip((HEAD, BODY), lengths)]
    assert [(phase.name, len(sizes)) for phase, sizes in rehearse.beginning(schedule, steps)] == [
        (phase.name, n) for phase, n in zip((HEAD, BODY), taken)]
    assert [len(sizes) for _, sizes in schedule] == list(lengths)


@pytest.mark.parametrize("parts", [[Scaffold(), Mr()], [Rep()]])
def test_nothing_comes_of_it(parts: list[Any]) -> None:
    fed = tiny_federation(parts)
    before = {k: t.clone() for k, t in state_of(fed).items()}
    seen = rehearse.rehearse(fed)
    assert seen.step > 0
    assert seen.visit >= 0
    assert seen.memory == 0                                     # no GPU
    assert all(torch.equal(t, before[k]) for k, t in state_of(fed).items())
    for _ in range(2):
        fed.round()
    assert not differences(fed, run_tiny(parts))


class Clock:
    """Time that passes when clients are loaded (3 s each) and make steps (0.01 s each)."""

    now = 0.0

    def __call__(self) -> float:
        return Clock.now


class Watched(Sequential):
    def run(self, works: Any) -> Any:
        for work in works:
            Clock.now += 3.0 + 0.01 * sum(len(sizes) for _, sizes in work.schedule)
            yield work.finish(None)                             # type: ignore[arg-type]


def test_steps_and_visits_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 24, 17, 5 and 40 samples, batches of 2, one epoch: 12, 8, 2 and 20 steps. Of these the few are 8, 8, 2 and 8, in
    4·3 + 26·0.01 = 12.26 s, and the many 8, 8, 2 and 16, in 12.34 s. So 8 steps more take 0.08 s: 0.01 each. What is left of the
    12.26 s is 12 s, 3 for each of four clients."""
    monkeypatch.setattr(rehearse, "time", SimpleNamespace(perf_counter=Clock()))
    monkeypatch.setattr(rehearse, "LONG", 100.0)
    seen = rehearse.rehearse(tiny_federation(engine=Watched, batch=2, epochs=1))
    assert seen.step == pytest.approx(0.01)
    assert seen.visit == pytest.approx(3.0)
    monkeypatch.setattr(rehearse, "LONG", 0.1)                  # 12.26 s are long: what they say must do
    assert rehearse.rehearse(tiny_federation(engine=Watched, batch=2, epochs=1)).step == pytest.approx(12.26 / 26)


def test_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps of 0.5 s and four visits of 1 s."""
    needs = estimate.estimate(tiny_federation(), 10, step_seconds=0.5, visit_seconds=1.0, on_gpu=3 << 30)
    assert "3 GiB of the GPU's, 0 B of disk, about 14.0 s of training a round" in needs.line()
    assert needs.record()["gpu_bytes"] == 3 << 30


class Gpu:
    """What a GPU would say of its memory: free, kept by PyTorch, and of that in use."""

    def __init__(self, patch: pytest.MonkeyPatch, free: int, reserved: int = 0, used: int = 0) -> None:
        self.used = used
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.used)


SAMPLES = torch.zeros(1000, 3, 4, 4, dtype=torch.uint8), torch.zeros(1000, dtype=torch.int64)           # 48,000 + 8,000 bytes


def test_samples_that_a_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 56_000)
    estimate.refuse_samples_without_room(*SAMPLES, torch.device("cuda"))
    Gpu(monkeypatch, 55_999)
    estimate.refuse_samples_without_room(*SAMPLES, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"The samples take 55 KiB and the GPU has 55 KiB free\. .*device=cpu"):
        estimate.refuse_samples_without_room(*SAMPLES, torch.device("cuda"))


def test_what_an_earlier_run_left_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps 60,000 bytes, of which 4,000 and then 4,001 are in use: 56,000 and 55,999 are to be had."""
    Gpu(monkeypatch, 0, reserved=60_000, used=4_000)
    estimate.refuse_samples_without_room(*SAMPLES, torch.device("cuda"))
    Gpu(monkeypatch, 0, reserved=60_000, used=4_001)
    with pytest.raises(ConfigError, match="55 KiB free"):
        estimate.refuse_samples_without_room(*SAMPLES, torch.device("cuda"))


def test_an_earlier_run_that_nobody_knows_any_more_is_taken_apart_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A federation and its engine know each other, so they stay until they are collected."""
    gpu = Gpu(monkeypatch, 0, reserved=60_000, used=60_000)

    class Earlier:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            gpu.used = 0
    Earlier()
    estimate.refuse_samples_without_room(*SAMPLES, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [[Scaffold(), Mr()], [Rep()]])
def test_on_a_gpu(parts: list[Any]) -> None:
    from consilience.engines.slots import Slots
    fed = tiny_federation(parts, engine=Slots, device="cuda")
    seen = rehearse.rehearse(fed)
    assert 0 < seen.step < 1
    assert seen.memory > 0
    for _ in range(2):
        fed.round()
    assert not differences(fed, run_tiny(parts, engine=Slots, device="cuda"))
