"""The demo as a new user runs it: it agrees with simulation, and nothing of it stays behind, also after Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.federation


def start(tmp_path, *more: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "consilience", "federation", "demo", "--out", str(tmp_path / "d"), *more],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_demo_equals_simulation_and_leaves_nothing_running(tmp_path, leftovers):
    demo = start(tmp_path, "--rounds", "2", "--json")
    out, err = demo.communicate(timeout=570)
    assert demo.returncode == 0, err
    document = json.loads(out)
    assert document["method"] == "dbe+scaffold"
    # One thread at every site, the same keys, the same order of sums: the same bits. 1e-6 leaves room for another CPU's kernels.
    assert document["largest_parameter_difference"] <= 1e-6
    assert [abs(s["difference"]) for s in document["sites"]] == [0.0] * 3
    assert len({tuple(s["labels"]) for s in document["sites"]}) == 3                 # differently skewed
    log = (tmp_path / "d" / "server" / "logs" / "superlink.log").read_text()
    assert "https://127.0.0.1" in log
    assert leftovers() == []


def test_interrupted_it_stops_what_it_started(tmp_path, leftovers):
    demo = start(tmp_path, "--rounds", "500")
    records = tmp_path / "d" / "run" / "records.jsonl"
    deadline = time.monotonic() + 300
    while not records.is_file() and demo.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers()                                                               # it is at work
    demo.send_signal(signal.SIGINT)
    err = demo.communicate(timeout=120)[1]
    assert demo.returncode == 130, err
    assert "Traceback" not in err
    assert leftovers() == []
