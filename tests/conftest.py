"""One thread, so that sums are added in one order; and few, repeatable examples for properties."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("consilience", deadline=None, max_examples=20, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("consilience")
