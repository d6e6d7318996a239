"""Made-up data whose heterogeneity is set by dials."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...errors import ConfigError
from ...options import option
from ..dataset import Dataset
from .base import Source


@dataclass(frozen=True)
class Synthetic(Source):
    """Gaussian clusters: x = centre of the class + feature_shift · offset of the client + noise · ε.

    Centres, offsets and ε are standard normal. Samples carry the group "client", with its own label distribution
    (Dirichlet of concentration `label_skew`), its own offset and its own size (Dirichlet of concentration
    `quantity_skew`). With `size` the same numbers, squashed to 0–255, are images of one channel.
    """

    samples: int = option(2000, "samples in all", low=1)
    classes: int = option(10, "classes", low=2)
    features: int = option(32, "numbers per sample; without meaning for images", low=1)
    size: int = option(0, "side of square images; 0 makes vectors", low=0)
    noise: float = option(1.0, "standard deviation around the centre", low=0.0)
    clients: int = option(10, "how many clients make the samples", low=1)
    label_skew: float = option(0.0, "Dirichlet concentration of a client's labels; 0 gives every client all classes alike", low=0.0)
    feature_shift: float = option(0.0, "length of a client's own offset, per feature", low=0.0)
    quantity_skew: float = option(0.0, "Dirichlet concentration of the clients' sizes; 0 makes them equal", low=0.0)
    seed: int = option(0, "another seed makes other samples", low=0)

    name = "synthetic"
    title = "Gaussian clusters with dials for label skew, feature shift and quantity skew"
    kind = "made up"
    how_to_get = "it is generated."
    default_split = "by_group(group='client')"

    def read(self, directory: str | Path | None = None) -> Dataset:
        if self.samples < self.clients:
            raise ConfigError(f"Source 'synthetic' cannot share {self.samples} samples among {self.clients} clients. "
                              f"Raise samples or lower clients.")
        key = rng.key(self.seed, "synthetic")
        width = self.size * self.size or self.features
        client = torch.repeat_interleave(torch.arange(self.clients), self._sizes(key))
        y = self._labels(key, client)
        centres = rng.normal(rng.key(key, "centres"), (self.classes, width))
        offsets = rng.normal(rng.key(key, "offsets"), (self.clients, width))
        x = (centres[y] + self.feature_shift * offsets[client]
             + self.noise * rng.normal(rng.key(key, "noise"), (self.samples, width)))
        if self.size:   # three standard deviations of the centres fit into the range
            x = (x.div(6).add(0.5).clamp(0, 1) * 255).round().to(torch.uint8).reshape(-1, 1, self.size, self.size)
        order = rng.permutation(rng.key(key, "order"), self.samples)
        return Dataset(name=self.name, x=x[order].contiguous(), y=y[order], classes=self.classes,
                       groups={"client": client[order]},
                       group_names={"client": tuple(str(i) for i in range(self.clients))})

    def for_clients(self, clients: int) -> Synthetic:
        return dataclasses.replace(self, clients=clients)

    def _sizes(self, key: Tensor) -> Tensor:
        """Samples per client, each at least 1, that add up to `samples`."""
        shares = np.full(self.clients, 1 / self.clients)
        if self.quantity_skew:
            shares = rng.host(rng.key(key, "sizes")).dirichlet(np.full(self.clients, self.quantity_skew))
        cuts = np.floor(np.cumsum(shares) * (self.samples - self.clients) + 1e-9).astype(np.int64)
        cuts[-1] = self.samples - self.clients
        return torch.from_numpy(np.diff(cuts, prepend=0) + 1)

    def _labels(self, key: Tensor, client: Tensor) -> Tensor:
        if not self.label_skew:
            return rng.integers(rng.key(key, "labels"), self.classes, (self.samples,))
        draw = rng.host(rng.key(key, "label skew"))
        odds = draw.dirichlet(np.full(self.classes, self.label_skew), size=self.clients)
        ends = torch.from_numpy(odds).cumsum(1)
        ends[:, -1] = 1.0
        u = rng.uniform(rng.key(key, "labels"), (self.samples,)).double()
        return (u[:, None] > ends[client]).sum(1)
