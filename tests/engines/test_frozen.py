"""A module's own train() is its own in every engine: statistics that a user froze stay frozen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import test_slots_host
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from consilience.core.federation import Federation
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines import Sequential
from consilience.engines._pool import Pool
from consilience.engines.slots import Slots
from consilience.engines.workers import Workers
from consilience.metrics.accuracy import score_global
from consilience.testing import LAYOUT, TinyNet, largest_difference, tiny_population

seen = test_slots_host.seen                   # streams and graphs that do nothing


class FrozenNet(TinyNet):
    """A user's model whose train() leaves normalisation in eval."""

    def train(self, mode: bool = True) -> FrozenNet:
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
        return self


def trained(engine: Any) -> Federation:
    """Scoring and training take turns with the mode, and clients with the network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = FrozenNet()
    fed = Federation(net, LAYOUT, Method([]), tiny_population(), Policy(lr=0.05, batch=8), engine)
    for _ in range(2):
        fed.round()
        score_global(fed, [fed.samples.rows[0].train], ["0"])
    assert fed.model["buffers"]
    assert all(torch.equal(v, fed.spec.model["buffers"][k]) for k, v in fed.model["buffers"].items())
    return fed


def test_workers() -> None:
    pool = Pool(1)
    try:
        assert largest_difference(trained(Sequential), trained(Workers.sharing(pool))) == 0
    finally:
        pool.close()


def test_slots(seen: SimpleNamespace) -> None:
    assert largest_difference(trained(Sequential), trained(Slots.of(3))) == 0
