"""Each class is divided among the clients by one Dirichlet draw (METHODS §8.1-A)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...options import option
from ..dataset import Dataset
from .base import (
    Divided,
    Split,
    by_first_row,
    client_names,
    cut_points,
    deal,
    gave_up,
    log_dirichlet,
    require_enough,
    rows_by_label,
    shuffled,
)


@dataclass(frozen=True)
class Dirichlet(Split):
    """For each class: shares ~ Dirichlet(alpha, …, alpha) over the clients.

    A client that already holds n / clients samples gets nothing more: the cap. It goes through the classes in label order,
    by its definition. Without it the order has no effect.
    """

    name = "dirichlet"
    summary = "each class over the clients by a Dirichlet draw, with cap and retry"

    alpha: float = option(0.5, "concentration per client; small is skewed", above=0, tune=(0.05, 0.1, 0.5, 1.0))
    min_size: int = option(10, "draw again until every client has this many samples", low=1)
    cap: bool = option(True, "a client at or above the mean size receives nothing of later classes")
    tries: int = option(100, "draws before giving up", low=1)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        require_enough(self.name, len(rows), n, self.min_size)
        classes = rows_by_label(dataset, rows)
        classes = [c for c in classes if len(c)] if self.cap else by_first_row(classes)
        sizes = self._sizes(classes, len(rows), n, key)
        pieces = [deal(shuffled(c, key), s) for c, s in zip(classes, sizes)]
        return [torch.cat(parts) for parts in zip(*pieces)], client_names(n)

    def _sizes(self, classes: list[Tensor], total: int, n: int, key: Tensor) -> np.ndarray:
        """Classes × clients: how many samples each client receives of each class."""
        best = 0
        for attempt in range(self.tries):
            sizes = np.zeros((len(classes), n), dtype=np.int64)
            held = np.zeros(n, dtype=np.int64)
            for i, members in enumerate(classes):
                shares = self.log_shares(members, n, attempt, key)
                if self.cap:
                    shares = np.where(held >= total / n, -np.inf, shares)     # someone is below the mean: never all
                sizes[i] = cut_points(np.exp(shares - np.logaddexp.reduce(shares)), len(members))
                held += sizes[i]
            if held.min() >= self.min_size:
                return sizes
            best = max(best, int(held.min()))
        raise gave_up(self, self.tries, n, self.min_size, best)

    def log_shares(self, members: Tensor, n: int, attempt: int, key: Tensor) -> np.ndarray:
        """The draw for one class; it depends on the class, the try and the key only."""
        generator = rng.host(rng.key(key, "dirichlet", attempt, "class", int(members[0])))
        return log_dirichlet(np.full(n, self.alpha), generator)
