"""Summaries over seeds: mean ± standard deviation, and paired differences with an interval and a test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t: what scipy.stats calls, without its half second of imports

ROUNDING = 1e-12          # of a value: where accuracies differ by as many samples, their differences differ by less than this of them


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divided by n − 1); the latter is None for one value."""

    mean: float
    std: float | None
    n: int

    def text(self, digits: int = 3) -> str:
        return f"{self.mean:.{digits}f}" + (f" ± {self.std:.{digits}f}" if self.std is not None else "")


def spread(values: Sequence[float | None]) -> Spread | None:
    """Over seeds that have the value; None where none has."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Paired:
    """Difference to a reference over the same seeds: Student's t interval and two-sided test on the differences."""

    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    n: int
    level: float = 0.95

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired(values: Sequence[float | None], reference: Sequence[float | None], level: float = 0.95) -> Paired | None:
    """Seed by seed; pairs with a missing value are left out. With one pair, or with differences that are all alike, there is nothing to
    measure a difference by: no interval and no test."""
    pairs = np.array([(a, b) for a, b in zip(values, reference) if a is not None and b is not None])
    n = len(pairs)
    if n == 0:
        return None
    differences = pairs[:, 0] - pairs[:, 1]
    mean = float(differences.mean())
    if np.ptp(differences) <= ROUNDING * np.abs(pairs).max():       # of the values: next to a small difference their rounding is large
        return Paired(mean, None, None, None, n, level)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.5 + level / 2)) * error
    return Paired(mean, mean - half, mean + half, float(2 * stdtr(n - 1, -abs(mean / error))), n, level)
