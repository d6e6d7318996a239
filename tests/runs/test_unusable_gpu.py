"""A GPU that is there and cannot be used now is said so, once, and ends a set of runs before each of them has tried it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch

from consilience.errors import DeviceError
from consilience.runs import many
from consilience.runs.config import RunConfig
from consilience.runs.listener import Watcher
from consilience.runs.many import Job, Unusable, run_many

run = import_module("consilience.runs.run")                      # its package has a function of that name
SAID = ("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for `cudaErrorDevicesUnavailable' in …\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.")
CONFIG = RunConfig.make({"method": "fedavg", "data": "digits", "rounds": 1, "clients": 2})


def test_it_is_said_in_one_line_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*size: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError(SAID)
    monkeypatch.setattr(torch, "zeros", busy)
    with pytest.raises(DeviceError) as error:
        run.start(torch.device("cuda", 1))
    message = str(error.value)
    assert message.startswith("The GPU cuda:1 cannot be used now: CUDA error: CUDA-capable device(s) is/are busy or unavailable. ")
    assert "nvidia-smi" in message
    assert "device=cpu" in message
    assert "\n" not in message
    assert error.value.exit_code == 2
    run.start(torch.device("cpu"))                                   # asks nothing


def test_a_federation_starts_its_devices_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[torch.device] = []
    monkeypatch.setattr(run, "start", started.append)
    monkeypatch.setattr(run, "devices_of", lambda config: (torch.device("cpu"), torch.device("cpu", 0)))
    run.build_federation(CONFIG, run.load_data(CONFIG))
    assert started == [torch.device("cpu"), torch.device("cpu", 0)]


class Ear(Watcher):
    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None]] = []

    def run_done(self, label: str, failure: str | None) -> None:
        self.ended.append((label, failure))


def jobs(count: int) -> list[Job]:
    return [Job(str(n), CONFIG, None) for n in range(count)]


def test_one_at_a_time_the_first_ends_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*given: Any, **more: Any) -> Any:
        raise DeviceError("busy")
    monkeypatch.setattr(many, "run_config", busy)
    ear = Ear()
    outcomes = run_many(jobs(3), "trying", workers=1, watcher=ear)
    assert outcomes == ["busy"] * 3
    assert all(isinstance(o, Unusable) for o in outcomes)
    assert ear.ended == [("0", "busy")]                              # the others were not begun


class Threads(ThreadPoolExecutor):
    """In place of processes, which would not see what a test puts in place."""

    def __init__(self, workers: int, mp_context: Any, initializer: Any, initargs: tuple[Any, ...]) -> None:
        super().__init__(workers)
        many._SHARED[:] = initargs[:2]


def in_threads(monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> list[str]:
    """What became of as many runs as there are ends, two at a time: each in vain, broken, or well after a round."""
    def attempt(*given: Any, **more: Any) -> Any:
        end, heard = ends[int(given[0]["seed"])], given[3]
        tried.append(int(given[0]["seed"]))
        if end == "well":
            heard(1)
            return {"done": True}, []
        return (Unusable("busy") if end == "in vain" else "broken"), []
    tried: list[int] = []
    monkeypatch.setattr(many, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(many, "_attempt", attempt)
    monkeypatch.setattr(many, "read_finished", lambda job: None)
    work = [Job(str(n), RunConfig.make(CONFIG.flat() | {"seed": n}), None) for n in range(len(ends))]
    outcomes = run_many(work, "trying", workers=2)
    return ["well" if isinstance(o, dict) else str(o) if n in tried else "left" for n, o in enumerate(outcomes)]


def test_several_at_a_time_as_many_in_a_row_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    became = in_threads(monkeypatch, ["in vain"] * 50)
    assert became[:2] == ["busy"] * 2
    assert became[-1] == "left"


def test_one_in_vain_among_others_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ["in vain", "well", "broken", "well", "well", "in vain"]
    assert in_threads(monkeypatch, ends) == ["busy", "well", "broken", "well", "well", "busy"]
