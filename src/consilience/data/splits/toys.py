"""Two clients, for looking at what heterogeneity does (METHODS §8.1-D)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split, client_names, rows_by_label, shuffled


class _TwoClients(Split):
    def _number(self, clients: int | None) -> int:
        if clients not in (None, 2):
            raise ConfigError(f"Split {self.name!r} makes 2 clients, but clients={clients} was asked for. Leave it out.")
        return 2


@dataclass(frozen=True)
class TwoHalves(_TwoClients):
    """Classes 0–4 and 5–9 (FedBR's Fig. 2); a share alpha of each class goes to the other client (its Fig. 15)."""

    name = "two_halves"
    summary = "two clients, half of the classes each, with a share alpha exchanged"

    alpha: float = option(0.0, "share of each class that the other client holds; 0.5 is balanced", low=0, high=0.5)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        parts: list[list[Tensor]] = [[], []]
        for label, members in enumerate(rows_by_label(dataset, rows)):
            owner = int(label >= (dataset.classes + 1) // 2)
            away = round(self.alpha * len(members))
            members = shuffled(members, key)
            parts[1 - owner].append(members[:away])
            parts[owner].append(members[away:])
        return [torch.cat(p) for p in parts], client_names(n)


@dataclass(frozen=True)
class TwoDominant(_TwoClients):
    """Half of a client is one class, the rest is spread equally (FedFM's Fig. 2: airplane and car, 5000 each)."""

    name = "two_dominant"
    summary = "two clients, each dominated by one class"

    share: float = option(0.5, "share of the dominant class", above=0, high=1)
    size: int = option(5000, "samples of each client", low=2)
    first: int = option(0, "dominant class of the first client", low=0)
    second: int = option(1, "dominant class of the second client", low=0)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        for label in (self.first, self.second):
            if label >= dataset.classes:
                raise ConfigError(f"Split 'two_dominant' names class {label}, but {dataset.name!r} has classes 0 to "
                                  f"{dataset.classes - 1}.")
        pools = [shuffled(members, key) for members in rows_by_label(dataset, rows)]
        held = torch.tensor([len(p) for p in pools])
        too_large = lambda size: bool((self._demand(size, dataset.classes).sum(0) > held).any())
        if too_large(self.size):
            fits = bisect.bisect_left(range(1, self.size), True, key=too_large)
            how = f"Set size to at most {fits}." if fits > 1 else "Take a data set with more samples of every class."
            raise DataError(f"Split 'two_dominant' with size={self.size} asks for more of a class than {dataset.name!r} "
                            f"has. {how}")
        demand = self._demand(self.size, dataset.classes).tolist()
        mine = torch.cat([p[:a] for p, a in zip(pools, demand[0])])
        other = torch.cat([p[a : a + b] for p, a, b in zip(pools, *demand)])
        return [mine, other], client_names(n)

    def _demand(self, size: int, classes: int) -> Tensor:
        """Clients × classes. What does not divide evenly goes to the lowest of the other classes, one each."""
        demand = torch.zeros(2, classes, dtype=torch.int64)
        for client, dominant in enumerate((self.first, self.second)):
            others = [c for c in range(classes) if c != dominant]
            demand[client, dominant] = size if not others else round(self.share * size)
            rest = size - int(demand[client, dominant])
            for i, c in enumerate(others):
                demand[client, c] = rest // len(others) + (i < rest % len(others))
        return demand
