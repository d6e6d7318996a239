"""Splits that do not look at labels: equal shares, and shares of unequal size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ... import rng
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split, client_names, cut_points, deal, gave_up, log_dirichlet, require_enough, shuffled


@dataclass(frozen=True)
class IID(Split):
    """Shuffle, then deal; sizes differ by at most one."""

    name = "iid"
    summary = "equal random shares"
    needs_labels = False

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        require_enough(self.name, len(rows), n, 1)
        sizes = np.full(n, len(rows) // n)
        sizes[: len(rows) % n] += 1
        return deal(shuffled(rows, key), sizes), client_names(n)


@dataclass(frozen=True)
class Quantity(Split):
    """Clients differ in size only: sizes ~ Dirichlet(alpha, …, alpha), the samples are drawn alike."""

    name = "quantity"
    summary = "random shares whose sizes follow a Dirichlet draw"
    needs_labels = False

    alpha: float = option(0.5, "concentration per client; small is skewed", above=0, tune=(0.1, 0.5, 1.0))
    min_size: int = option(10, "draw again until every client has this many samples", low=1)
    tries: int = option(100, "draws before giving up", low=1)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        require_enough(self.name, len(rows), n, self.min_size)
        best = 0
        for attempt in range(self.tries):
            draw = log_dirichlet(np.full(n, self.alpha), rng.host(rng.key(key, "quantity", attempt)))
            sizes = cut_points(np.exp(draw), len(rows))
            if sizes.min() >= self.min_size:
                return deal(shuffled(rows, key), sizes), client_names(n)
            best = max(best, int(sizes.min()))
        raise gave_up(self, self.tries, n, self.min_size, best)
