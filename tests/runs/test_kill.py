"""Killed with SIGKILL at random moments, runs end as if nothing had happened; see tests/kill_runs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kill_runs.py"


def kill(*arguments: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_five_kills():
    assert kill("--kills", "5", "--methods", "scaffold+dbe").endswith("5 kills, no difference\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_three_kills_with_states_on_disk():
    assert kill("--kills", "3", "--methods", "scaffold+dbe", "--store", "disk").endswith("3 kills, no difference\n")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_fifty_kills_of_three_methods(store):
    assert kill("--store", store).endswith("50 kills, no difference\n")
