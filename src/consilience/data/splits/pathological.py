"""A few classes per client, with unbalanced sizes (METHODS §5.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...errors import ConfigError, DataError
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split, client_names, deal, rows_by_label, shuffled


@dataclass(frozen=True)
class Pathological(Split):
    """Classes in label order; each goes to the first ceil(clients / classes · classes_per_client) that still need one.

    All but the last of these clients receive a random number from max(mean / 10, least / classes) up to the mean; the
    last receives the rest. Where clients · classes_per_client is no multiple of the number of classes, the last clients
    hold fewer classes and the last classes may go to no one.
    """

    name = "pathological"
    summary = "a fixed number of classes per client, unbalanced sizes"

    classes_per_client: int = option(2, "classes of a client", low=1, tune=(2, 5, 10))
    balanced: bool = option(False, "divide a class equally instead")
    least: int = option(40, "least / classes is the smallest number of samples of a class at a client", low=1)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        n = self._number(clients)
        classes = rows_by_label(dataset, rows)
        if self.classes_per_client > dataset.classes:
            raise ConfigError(f"Split 'pathological' gives {self.classes_per_client} classes to each client, but "
                              f"{dataset.name!r} has {dataset.classes}. Set classes_per_client to at most {dataset.classes}.")
        share = math.ceil(n * self.classes_per_client / dataset.classes)
        needs = np.full(n, self.classes_per_client)
        parts: list[list[Tensor]] = [[] for _ in range(n)]
        for label, members in enumerate(classes):
            owners = np.flatnonzero(needs > 0)[:share]
            if not len(owners):
                break
            sizes = self._sizes(dataset, label, members, len(owners), key)
            for owner, piece in zip(owners, deal(shuffled(members, key), sizes)):
                parts[owner].append(piece)
            needs[owners] -= 1
        return [torch.cat(p) if p else rows[:0] for p in parts], client_names(n)

    def _sizes(self, dataset: Dataset, label: int, members: Tensor, owners: int, key: Tensor) -> list[int]:
        mean, floor = len(members) / owners, self.least / dataset.classes
        if mean < 1:
            raise DataError(f"Split 'pathological' divides class {label} of {dataset.name!r} among {owners} clients, but "
                            f"it has {len(members)} samples. Lower the number of clients, or classes_per_client.")
        if self.balanced or owners == 1:
            sizes = [int(mean)] * (owners - 1)
        else:
            if floor > mean:
                raise DataError(f"Split 'pathological': class {label} of {dataset.name!r} has {mean:.1f} samples for each "
                                f"of {owners} clients, but least={self.least} asks for {floor:.1f}. Set least to at "
                                f"most {int(mean * dataset.classes)}, or lower the number of clients.")
            low = max(int(max(mean / 10, floor)), 1)
            sizes = rng.host(rng.key(key, "class", label)).integers(low, max(int(mean), low + 1), owners - 1).tolist()
        return [*sizes, len(members) - sum(sizes)]
