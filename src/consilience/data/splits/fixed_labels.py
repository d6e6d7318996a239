"""Label distributions fixed by a rule instead of drawn: dominant classes, missing classes (METHODS §3.6)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split, client_names, rows_by_label, shuffled


@dataclass(frozen=True)
class DominantClass(Split):
    """FedFM's NIID-2. Client i takes `own` shards of each of its classes and `common` shards of every class.

    Its classes are the i-th of equal consecutive groups of labels. Shards are cut in file order, so nothing is drawn
    unless `shuffle` is set: the first `own` shards of a class are its owner's, then `common` for each client in turn.
    With the shard left out it is the largest that fits: 100 samples for CIFAR-10 and ten clients (2300 / 300), and
    10 for CIFAR-100 (230 / 30); CINIC-10 is own=40, common=5 (4500 / 500).
    """

    name = "dominant_class"
    summary = "much of one group of classes, a little of all (NIID-2)"

    own: int = option(20, "shards of each class that dominates", low=0)
    common: int = option(3, "shards of every class", low=0)
    shard: int | None = option(None, "samples in a shard; the largest that fits when left out", low=1)
    shuffle: bool = option(False, "shuffle each class before it is cut")

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        if dataset.classes % n:
            raise ConfigError(f"Split 'dominant_class' gives each client an equal group of classes, but {n} clients do "
                              f"not divide the {dataset.classes} classes of {dataset.name!r}. Set the number of clients "
                              f"to a divisor of {dataset.classes}.")
        classes = rows_by_label(dataset, rows)
        fewest = min(len(c) for c in classes)
        pieces = self.own + n * self.common
        if not pieces:
            raise ConfigError("Split 'dominant_class' with own=0 and common=0 gives nothing to anyone. Set one.")
        shard = self.shard or fewest // pieces
        if not shard or shard * pieces > fewest:
            raise DataError(f"Split 'dominant_class' cuts {pieces} shards of {shard or 1} from every class, but the "
                            f"smallest class of {dataset.name!r} has {fewest} samples. "
                            + (f"Set shard to at most {fewest // pieces}." if fewest >= pieces else
                               f"Lower own or common until own + {n} · common is at most {fewest}."))
        parts: list[list[Tensor]] = [[] for _ in range(n)]
        for label, members in enumerate(classes):
            members = shuffled(members, key) if self.shuffle else members
            owner = label // (dataset.classes // n)
            start = self.own * shard
            parts[owner].append(members[:start])
            for client in range(n):
                parts[client].append(members[start : start + self.common * shard])
                start += self.common * shard
        return [torch.cat(p) for p in parts], client_names(n)


@dataclass(frozen=True)
class MissingClasses(Split):
    """FedFM's NIID-3. Client i owns the classes (i + j) mod C for j = 0 … C − 1 − missing, the same number of each.

    That number is the largest that every class can give to all its owners: floor(5000 / (10 − missing)) for CIFAR-10
    and ten clients. What is left over is unused.
    """

    name = "missing_classes"
    summary = "each client lacks some classes, equal amounts of the others (NIID-3)"

    missing: int = option(3, "classes that a client lacks", low=0, tune=(1, 2, 3, 5, 7))

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        kinds = dataset.classes
        if self.missing >= kinds:
            raise ConfigError(f"Split 'missing_classes' with missing={self.missing} leaves no class of the {kinds} of "
                              f"{dataset.name!r}. Set missing to at most {kinds - 1}.")
        owned = [[(i + j) % kinds for j in range(kinds - self.missing)] for i in range(n)]
        owners = self._owners(n, kinds)
        pools = [shuffled(members, key) for members in rows_by_label(dataset, rows)]
        each = min(len(p) // k for p, k in zip(pools, owners) if k)
        if not each:
            label = min((c for c in range(kinds) if owners[c]), key=lambda c: len(pools[c]) / owners[c])
            too_many = lambda m: any(k > len(p) for p, k in zip(pools, self._owners(m, kinds)))
            fits = bisect.bisect_left(range(1, n), True, key=too_many)
            how = f"Lower the number of clients to at most {fits}." if fits else f"Class {label} has to have samples."
            raise DataError(f"Split 'missing_classes' divides class {label} of {dataset.name!r} among {owners[label]} "
                            f"clients, but it has {len(pools[label])} samples. {how}")
        parts, given = [], [0] * kinds
        for own in owned:
            parts.append(torch.cat([pools[c][given[c] : given[c] + each] for c in own]))
            for c in own:
                given[c] += each
        return parts, client_names(n)

    def _owners(self, n: int, kinds: int) -> list[int]:
        """How many of n clients own each class: those i for which (class − i) mod C is below C − missing."""
        return [sum((c - i) % kinds < kinds - self.missing for i in range(n)) for c in range(kinds)]
