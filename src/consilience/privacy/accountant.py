"""(ε, δ) of Gaussian releases, by Google's dp-accounting. It alone is imported here, and only when something is counted.

A release is a sum of vectors, one of each client, with Gaussian noise; its multiplier is the noise's standard deviation over the
most that one client can change the sum. Releases with multipliers z₁, z₂, … are together exactly as telling as one release with
multiplier (Σ 1/z²)^(−1/2), also when each is chosen after the ones before were seen. So without sampling one number is enough to
remember, and the conversion to (ε, δ) is exact (Balle and Wang, ICML 2018). With sampling of clients there is no such closed form:
Rényi divergences at many orders are added up and converted, which gives an upper bound.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

PACKAGE = "dp_accounting"
ORDERS = 156           # how many orders dp-accounting's own list has; a test compares


def installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def epsilon_of(spent: float, delta: float) -> float:
    """ε at δ after releases whose Σ 1/z² is `spent`."""
    if spent <= 0:
        return 0.0
    if not math.isfinite(spent):
        return math.inf
    from dp_accounting import get_epsilon_gaussian
    return float(get_epsilon_gaussian(spent**-0.5, delta))


@cache
def rdp_of(spent: float, size: int, population: int) -> tuple[float, ...]:
    """Rényi divergences of one round that draws `size` of `population` clients, all sets alike, and releases with Σ 1/z² = `spent`.

    Neighbours: one client's data are replaced by any other data. With everybody drawn nothing is gained.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    accountant = _accountant(NeighboringRelation.REPLACE_ONE)
    event: Any = GaussianDpEvent(spent**-0.5)
    accountant.compose(SampledWithoutReplacementDpEvent(population, size, event) if size < population else event)
    return tuple(float(x) for x in accountant.rdp)


def sampled_epsilon_of(rdp: Sequence[float], delta: float) -> float:
    """ε at δ after rounds whose `rdp_of` add up to `rdp`."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import compute_epsilon
    orders = _accountant(NeighboringRelation.REPLACE_ONE).orders
    return float(compute_epsilon(orders, np.asarray(rdp, dtype=np.float64), delta)[0]) if any(rdp) else 0.0


def _accountant(relation: Any) -> Any:
    from dp_accounting.rdp import RdpAccountant
    return RdpAccountant(neighboring_relation=relation)
