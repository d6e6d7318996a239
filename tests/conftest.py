"""One thread, so that sums are added in one order; few, repeatable examples for properties; and a Ctrl-C that reaches whom tests start."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:        # as in a background job; whom tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("consilience", deadline=None, max_examples=20, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("consilience")
