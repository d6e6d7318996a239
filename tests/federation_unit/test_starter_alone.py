"""What the starter does when the SuperNode takes an answer badly, and what its end leaves behind, without a SuperNode."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from consilience.engines.flower import starter


def test_an_answer_that_was_cut_off_is_handed_over_again(monkeypatch):
    """The SuperNode waits for the arrays of an answer it knows of; they must come, or the site never answers again."""
    calls = []

    def push(client, reply, context):
        calls.append((client, reply, context))
        if len(calls) < 3:
            raise ObjectPushError("array", 1, "session")

    monkeypatch.setattr(starter, "push_message", push)
    monkeypatch.setattr(starter, "PAUSE", 0.0)
    starter.hand_over("client", "reply", "context")
    assert calls == [("client", "reply", "context")] * 3


def test_it_is_given_up_in_the_end(monkeypatch):
    def push(client, reply, context):
        raise ObjectPushError("array", 1, "session")

    monkeypatch.setattr(starter, "push_message", push)
    monkeypatch.setattr(starter, "PAUSE", 0.0)
    with pytest.raises(ObjectPushError):
        starter.hand_over("client", "reply", "context")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up under /proc")
def test_a_killed_starter_leaves_no_worker(tmp_path):
    """The worker held a copy of the starter's end of their pipe, so that it never saw it close."""
    script = ("import os, pathlib, sys, time\n"
              "from consilience.engines.flower import starter\n"
              "starter.PRELOAD = ()\n"
              "workers = starter.Workers('127.0.0.1:1', pathlib.Path(sys.argv[1]))\n"
              "workers._begin('app')\n"
              "print(workers.process.pid, flush=True)\n"
              "time.sleep(600)\n")
    killed = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(killed.stdout.readline())
    assert _lives(worker)
    killed.kill()
    killed.wait()
    deadline = time.monotonic() + 60
    try:
        while _lives(worker):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def _lives(process: int) -> bool:
    """Not gone, nor one that only waits to be buried."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
