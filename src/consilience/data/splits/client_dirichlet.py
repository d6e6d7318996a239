"""Each client draws its own distribution over classes and fills an equal shard from it (METHODS §8.1-B).

The two classes differ in the concentration, which changes the skew by far more than alpha suggests: with ten balanced
classes, alpha · p at alpha = 0.1 is 0.01 per class (about 1.2 effective classes per client), alpha is 0.1 (about 2.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split, by_first_row, client_names, log_dirichlet, require_enough, rows_by_label, shuffled


class _ClientDirichlet(Split):
    """Shards of floor(n / clients). A class that runs out leaves the distribution, which is then renormalised."""

    def _concentration(self, remaining: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        require_enough(self.name, len(rows), n, 1)
        pools = [shuffled(members, key) for members in by_first_row(rows_by_label(dataset, rows))]
        taken = np.zeros(len(pools), dtype=np.int64)
        held = np.array([len(p) for p in pools])
        parts = []
        for client in range(n):
            counts = self._counts(held - taken, len(rows) // n, rng.key(key, "client", client))
            parts.append(torch.cat([p[a : a + c] for p, a, c in zip(pools, taken.tolist(), counts.tolist())]))
            taken = taken + counts
        return parts, client_names(n)

    def _counts(self, remaining: np.ndarray, size: int, key: Tensor) -> np.ndarray:
        """How many of each class the client takes.

        Drawing class after class and passing over those that have run out is the same as drawing counts at once and
        cutting them at what is there, then drawing the missing ones from the classes left. Every turn of the loop
        either finishes or empties a class, so there are at most as many turns as classes.
        """
        generator = rng.host(key)
        counts = np.zeros_like(remaining)
        q = self._distribution(remaining, generator)
        while (need := size - counts.sum()) > 0:
            open_ = np.where(counts < remaining, q, 0.0)
            if open_.sum() <= 0:                # all of q's mass is on classes that ran out: draw a new q
                q = self._distribution(remaining - counts, generator)
                continue
            counts = np.minimum(counts + generator.multinomial(need, open_ / open_.sum()), remaining)
        return counts

    def _distribution(self, remaining: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """A draw over the classes that still have samples; 0 for the others."""
        left = remaining > 0
        q = np.zeros(len(remaining))
        q[left] = np.exp(log_dirichlet(self._concentration(remaining[left]), generator))
        return q


@dataclass(frozen=True)
class ClientDirichletPrior(_ClientDirichlet):
    """Concentration alpha · p, where p are the class frequencies that remain (FedBR's MNIST and CIFAR-10)."""

    name = "client_dirichlet_prior"
    summary = "equal shards; each client's classes ~ Dirichlet(alpha · remaining class frequencies)"

    alpha: float = option(0.1, "total concentration over all classes; small is skewed", above=0, tune=(0.1, 1.0, 10.0))

    def _concentration(self, remaining: np.ndarray) -> np.ndarray:
        return self.alpha * remaining / remaining.sum()


@dataclass(frozen=True)
class ClientDirichletFlat(_ClientDirichlet):
    """Concentration alpha for every class (FedBR's CIFAR-100)."""

    name = "client_dirichlet_flat"
    summary = "equal shards; each client's classes ~ Dirichlet(alpha, …, alpha)"

    alpha: float = option(0.1, "concentration per class; small is skewed", above=0, tune=(0.05, 0.1, 0.5))

    def _concentration(self, remaining: np.ndarray) -> np.ndarray:
        return np.full(len(remaining), self.alpha)
