"""What CUDA reads when it starts is there before anything starts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from consilience import cuda_start
from consilience.cuda_start import QUEUES, queues_of_each, set_before_start


def said(program: str, **environment: str) -> list[str]:
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return out.stdout.split()


SHOW = ("import os, torch; e = os.environ; "
        "print(e['CUDA_DEVICE_MAX_CONNECTIONS'], e['CUBLAS_WORKSPACE_CONFIG'], torch.cuda.is_initialized())")


def test_importing_the_package_sets_them_and_does_not_start_cuda(clean: dict[str, str]) -> None:
    assert said(f"import consilience; {SHOW}", **clean) == ["32", ":4096:8", "False"]


def test_so_does_importing_any_module_of_it(clean: dict[str, str]) -> None:
    assert said(f"import consilience.runs.run; {SHOW}", **clean) == ["32", ":4096:8", "False"]


def test_what_the_user_has_set_stays(clean: dict[str, str]) -> None:
    assert said(f"import consilience; {SHOW}", **clean, CUDA_DEVICE_MAX_CONNECTIONS="8") == ["8", ":4096:8", "False"]


def test_only_what_is_missing_is_set() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": "1"}
    assert set_before_start(environment) == {QUEUES}
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": "1", QUEUES: "32"}


@pytest.mark.parametrize(("processes", "each"), [(1, 32), (2, 16), (3, 10), (5, 6), (20, 4)])
def test_processes_on_one_gpu_share_the_queues(monkeypatch: pytest.MonkeyPatch, processes: int, each: int) -> None:
    """32 queues in whole shares, and no process has fewer than 4."""
    monkeypatch.setattr(cuda_start, "_OURS", frozenset({QUEUES}))
    assert queues_of_each(processes) == each


def test_a_users_number_of_queues_is_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_start, "_OURS", frozenset())
    assert queues_of_each(5) is None


@pytest.mark.parametrize(("given", "seen"), [("6", "6"), ("None", "32")])
def test_a_process_of_several_takes_its_share(clean: dict[str, str], given: str, seen: str) -> None:
    assert said(f"from consilience.runs import many; many._start_worker([], [], {given}); {SHOW}", **clean) == [seen, ":4096:8", "False"]


@pytest.fixture
def clean() -> dict[str, str]:
    """This process's environment without what the package has put into it."""
    return {k: v for k, v in os.environ.items() if k not in (QUEUES, "CUBLAS_WORKSPACE_CONFIG")}
