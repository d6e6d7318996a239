"""A client's training, validation and test rows, and FedFA's rules for its three data sets (METHODS §4.8)."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ... import rng
from ...errors import ConfigError, DataError


class Counts(NamedTuple):
    train: int
    val: int
    test: int


def _floor(x: float) -> int:
    """Down to a whole number; 0.7 · 10 counts as 7 though it is a little less in floating point."""
    return math.floor(round(x, 9))


def divide(rows: Tensor, sizes: Counts, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Training rows first, validation rows directly after them, test rows at the end; each part sorted.

    Without a key the rows are cut in the order they come in, without shuffling.
    """
    if sum(sizes) > len(rows):
        raise DataError(f"{sizes.train} training, {sizes.val} validation and {sizes.test} test rows were asked for, but "
                        f"the client has {len(rows)}. Lower one of the three.")
    if key is not None:
        rows = rows[rng.permutation(rng.key(key, "fractions"), len(rows))]
    train, val, test = sizes
    parts = rows[:train], rows[train : train + val], rows[len(rows) - test :]
    return parts[0].sort().values, parts[1].sort().values, parts[2].sort().values


def train_fraction(rows: Tensor, fraction: float, key: Tensor, least: int = 1) -> Tensor:
    """A fraction of a client's training rows, never fewer than `least` (or all there are): FedFA's Fig. 2.

    With the same key a smaller fraction is a part of a larger one.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"The training fraction must be above 0 and at most 1. Got {fraction!r} instead.")
    kept = min(max(_floor(fraction * len(rows)), least), len(rows))
    return rows[rng.permutation(rng.key(key, "train_fraction"), len(rows))[:kept]].sort().values


def office_counts(n: int) -> Counts:
    """FedFA's Office-Caltech-10 (Table 11) from the images of a domain: a fifth for the test, the rest 60 / 40."""
    test = math.ceil(round(n * 0.2, 9))
    train = _floor(0.6 * (n - test))
    return Counts(train, n - test - train, test)


def domainnet_counts(n_train_list: int, n_test_list: int, r: float = 0.4) -> Counts:
    """FedFA's DomainNet (Table 12 needs r = 0.4): the first 0.8 · r of the training list, its last fifth, the test list."""
    return Counts(_floor(0.8 * r * n_train_list), _floor(0.2 * n_train_list), n_test_list)


def prostate_counts(n: int, r: float = 0.6) -> Counts:
    """FedFA's prostate slices of a site (Table 13). r = 0.1 · k is the fraction k / 6 of Fig. 2; 32 images at least."""
    fifth = _floor(0.2 * n)
    return Counts(int(max(r * n, 32)), fifth, fifth)
