"""Which samples a client trains on, in which order and in which batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import rng
from .part import Phase
from .policy import Policy
from .population import Population

Schedule = list[tuple[Phase, list[int]]]      # phase by phase, the sizes of its batches


class Rows(NamedTuple):
    """A client's samples: those it trains on and those parts asked to hold back."""

    train: Tensor
    reserved: Tensor


class Samples:
    """The population's tensors on the device, and keyed orders over them."""

    def __init__(self, population: Population, policy: Policy, pooled: bool, share_held: float, device: torch.device) -> None:
        self.policy, self.device, self.transform = policy, device, population.transform
        self.x, self.y = population.x.to(device), population.y.to(device)
        rows = (torch.cat(population.rows),) if pooled else population.rows
        self.rows = [hold_back(own, share_held, rng.key(policy.seed, "reserve", i)) for i, own in enumerate(rows)]
        self.smallest = 1                     # smallest batch that the model and the parts can work with

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Samples transformed as in evaluation."""
        rows = rows.to(self.device)
        return self.transform(self.x.index_select(0, rows), self.y.index_select(0, rows), None)

    def batches(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(rows), self.policy.eval_batch):
            yield self.inputs(rows[start: start + self.policy.eval_batch])

    def schedule(self, number: int, phases: list[Phase]) -> Schedule:
        """The batches a client makes, phase by phase; empty when it cannot make one."""
        out = [(p, self._sizes(len(self.rows[number].train), p)) for p in phases]
        return out if any(sizes for _, sizes in out) else []

    def longest(self, phases: list[Phase]) -> int:
        """Steps of the client with the longest schedule."""
        return max(sum(len(self._sizes(len(r.train), p)) for p in phases) for r in self.rows)

    def _sizes(self, samples: int, phase: Phase) -> list[int]:
        """Sizes of the batches a client makes in a phase. A last batch under `smallest` is dropped in any case."""
        policy = self.policy
        full, rest = divmod(samples, policy.batch)
        if policy.sampling == "replacement":
            epoch = [policy.batch] * (max(full, 1) if samples else 0)
        else:
            epoch = [policy.batch] * full + ([rest] if policy.last_batch == "keep" and rest >= self.smallest else [])
        if not epoch:
            return []
        if phase.epochs is None and policy.steps is not None:
            return (epoch * (policy.steps // len(epoch) + 1))[: policy.steps]
        return epoch * (policy.epochs if phase.epochs is None else phase.epochs)

    def order(self, number: int, round_number: int, schedule: Schedule) -> Tensor:
        """(steps, batch): the rows of samples of every step. What a smaller last batch leaves over is padding, never read."""
        own = self.rows[number].train
        orders = [_draw_order(own, sizes, self.policy, rng.key(self.policy.seed, "order", number, round_number, phase.name))
                  for phase, sizes in schedule]
        return torch.cat(orders) if orders else own.new_zeros((0, self.policy.batch))


def hold_back(own: Tensor, share: float, key: Tensor) -> Rows:
    """Hold back a share of a client's samples, by a keyed draw."""
    order = rng.permutation(key, len(own))
    held = int(len(own) * share)
    return Rows(own[order[held:].sort().values], own[order[:held].sort().values])


def _draw_order(own: Tensor, sizes: list[int], policy: Policy, key: Tensor) -> Tensor:
    steps, batch = len(sizes), policy.batch
    if policy.sampling == "replacement":
        return own[rng.integers(key, max(len(own), 1), (steps, batch))] if steps else own.new_zeros((0, batch))
    out = own[:1].expand(steps * batch).clone().reshape(steps, batch)
    epoch, used, order = 0, len(own), own
    for step, size in enumerate(sizes):
        if used + size > len(own):
            order, used, epoch = own[rng.permutation(rng.key(key, epoch), len(own))], 0, epoch + 1
        out[step, :size] = order[used: used + size]
        used += size
    return out
