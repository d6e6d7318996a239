"""Noise that leaves nothing to learn from, found before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DROWNED = 5.0            # times as long as the change that it hides can be: changes do not grow with the model, noise does
BURIED = 2.0             # times as long as the model is at first; docs/privacy.md has what was tried


def drowned(deviation: float, bound: float, clients: int, trained: Sequence[Tensor]) -> str | None:
    """What to say of noise of that deviation on every number of a round's average, where changes are bounded; None where it is small."""
    numbers = sum(t.numel() for t in trained)
    length, size = deviation * numbers**0.5, math.hypot(*(float(torch.linalg.vector_norm(t)) for t in trained))
    found = ((length / bound, DROWNED, "the change it hides can be", "a smaller model"),
             (length / (size or math.inf), BURIED, "the model is at first", "a smaller dp.clip"))
    times, most, beside, cure = max(found, key=lambda f: f[0] / f[1])            # the worse of both: its cure is the one that helps
    return None if times < most else (
        f"adds noise {times:,.0f} times as long as {beside}, with {clients} client{'s' if clients != 1 else ''} in a round and {numbers:,} "
        f"numbers in the model. Models rarely learn from that. Use more clients in a round, {cure}, or less noise.")
