"""One thread, so that sums are added in one order; few, repeatable examples for properties; and a Ctrl-C that reaches whom tests start."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"              # for whom tests start: over tiny tensors threads do little but wait, and keep cores busy
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:        # as in a background job; whom tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("consilience", deadline=None, max_examples=20, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("consilience")
PATIENCE = 30.0                # seconds until a line that does not come is given up


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: garbage is not looked for among them again, which takes a quarter of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else Triton, where it is installed, complains at the end of what was never let go."""
    gc.unfreeze()


class Log:
    """What was written to standard error so far."""

    def __init__(self, capsys):
        self.capsys, self.text = capsys, ""

    def read(self):
        self.text += self.capsys.readouterr().err
        return self.text.splitlines()

    def wait_for(self, *words):
        """A line with all these words, which comes some time."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.read():
                if all(word in line for word in words):
                    return line
            time.sleep(0.005)
        pytest.fail(f"No line with {words} among {sorted({*self.text.splitlines()})}"[:2000])


@pytest.fixture
def log(monkeypatch, capsys):
    """A log in which lines of progress follow each other at once."""
    from consilience.runs import progress
    monkeypatch.setattr(progress, "EVERY", 0.01)
    return Log(capsys)
