"""FedBR's pseudo-data: means of random samples, from the clients or from public data, and mixtures of those with a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import rng
from ..core.client import ClientView
from ..core.part import Spec
from ..core.step import StepView
from ..core.task import as_probabilities


def at_first(spec: Spec, name: str, group: int, public: bool) -> Tensor:
    """One row for every sample of a batch: means of public samples, or zeros until the clients have sent theirs."""
    rows = spec.policy.batch
    if not public or spec.proxy is None:
        return torch.zeros(rows, *spec.sample)
    drawn = rng.integers(spec.key(name, "proxy"), len(spec.proxy), (rows, group))
    return spec.proxy[drawn.to(spec.proxy.device)].mean(1)


def own_share(c: ClientView, group: int, random: bool) -> Tensor:
    """This client's rows: those whose common draw names it; without `random` every client is named equally often."""
    rows, clients = c.spec.policy.batch, len(c.cohort)
    source = rng.integers(c.common_key, clients, (rows,)) if random else rng.permutation(c.common_key, rows) % clients
    mine = int((source == c.cohort.index(c.id)).sum())
    return c.take(rng.integers(c.key, c.size, (mine, group))).mean(1)


def mixture(v: StepView, x: Tensor, mix: int) -> tuple[Tensor, Tensor]:
    """Pseudo inputs, each mixed with `mix` samples of the batch, and the labels: uniform, mixed alike."""
    drawn = rng.integers(v.key("mix"), len(v.batch.x), (len(x), mix))
    labels = as_probabilities(v.batch.target, v.spec.classes)
    return (x + v.batch.x[drawn].sum(1)) / (mix + 1), (1.0 / v.spec.classes + labels[drawn].sum(1)) / (mix + 1)
