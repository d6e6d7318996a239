"""Means of random samples, from the clients (FedBR, FedMix) or from public data, and FedBR's mixtures of those with a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import rng
from ..core.client import ClientView
from ..core.network import Trace
from ..core.part import Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..tree import Tree

ASKED = {"once": "prepare", "round": "survey"}          # when samples are asked for -> the hook that does so


def at_first(spec: Spec, name: str, group: int, public: bool) -> Tensor:
    """One row for every sample of a batch: means of public samples, or zeros until the clients have sent theirs."""
    rows = spec.policy.batch
    if not public or spec.proxy is None:
        return torch.zeros(rows, *spec.sample)
    drawn = rng.integers(spec.key(name, "proxy"), len(spec.proxy), (rows, group))
    return spec.proxy[drawn.to(spec.proxy.device)].mean(1)


def own_groups(c: ClientView, rows: int, group: int, random: bool = True) -> Tensor:
    """Numbers of samples for this client's share of the rows, one group each. A row's client is named by a common draw; without `random`
    every client is named equally often.
    """
    clients = len(c.cohort)
    source = rng.integers(c.common_key, clients, (rows,)) if random else rng.permutation(c.common_key, rows) % clients
    mine = int((source == c.cohort.index(c.id)).sum())
    return rng.integers(c.key, c.size, (mine, group))


def own_share(c: ClientView, group: int, random: bool) -> Tensor:
    """This client's rows of as many as a batch has."""
    return c.take(own_groups(c, c.spec.policy.batch, group, random)).mean(1)


def mixture(v: StepView, x: Tensor, mix: int) -> tuple[Tensor, Tensor]:
    """Pseudo inputs, each mixed with `mix` samples of the batch, and the labels: uniform, mixed alike."""
    drawn = rng.integers(v.key("mix"), len(v.batch.x), (len(x), mix))
    labels = as_probabilities(v.batch.target, v.spec.classes)
    return (x + v.batch.x[drawn].sum(1)) / (mix + 1), (1.0 / v.spec.classes + labels[drawn].sum(1)) / (mix + 1)


def of_step(v: StepView, mix: int) -> tuple[Tensor, Tensor | None]:
    """A step's pseudo inputs, mixed with the batch where `mix` says so, and their labels: none where they are uniform."""
    x = v.shared["pseudo"]
    return v.once("pseudo", lambda: mixture(v, x, mix)) if mix else (x, None)


def passed(v: StepView, x: Tensor) -> Trace:
    """The model's pass over a step's pseudo inputs."""
    return v.forward(v.model, x, train=True, label="pseudo")


def looked_at(c: ClientView, when: str) -> Tree:
    """z_g where it is made "once" a round; room for it where the "first" step makes it; nothing where every "step" does."""
    x = c.shared["pseudo"]
    if when == "step":
        return {}
    if when == "first":
        return {"global": x.new_zeros((len(x), c.spec.width)), "made": x.new_zeros((), dtype=torch.bool)}
    return {"global": c.forward(c.received, x).before[c.spec.features]}


def in_received(v: StepView, x: Tensor) -> Tensor:
    """z_g of a step's pseudo inputs."""
    return v.forward(v.received, x, label="pseudo").before[v.spec.features]


def features(v: StepView, x: Tensor) -> Tensor:
    """z_p, z_g and z one below the other. z_g comes from the round's scratch, or from a pass of the received model."""
    fixed = v.scratch["global"] if "global" in v.scratch else in_received(v, x)
    return paired(passed(v, x).before[v.spec.features], fixed, v.features)


def paired(*rows: Tensor) -> Tensor:
    """Row i beside row i of the others: where the last batch is smaller, its rows meet the first of the pseudo-data."""
    n = len(rows[-1])
    return torch.cat([r if len(r) == n else r[:n] for r in rows])
