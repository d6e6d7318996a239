"""Local training phase by phase as an ordinary loop: module, backward, torch.optim.SGD on the phase's parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from one_step import plain_net

from consilience.core.federation import Federation
from consilience.core.part import Model, Phase
from consilience.testing import TinyNet


def train_by_phases(fed: Federation, number: int, start: Model, phases: list[tuple[str, list[str], int]],
                    round_number: int | None = None) -> TinyNet:
    """phases: (name, prefixes of the parameters that train, epochs). Draws are those of the coming round, or of the one named."""
    net = plain_net(start)
    policy = fed.policy
    for name, prefixes, epochs in phases:
        chosen = [p for k, p in net.named_parameters() if k.startswith(tuple(prefixes))]
        optimiser = torch.optim.SGD(chosen, policy.lr, momentum=policy.momentum, weight_decay=policy.weight_decay)
        schedule = [(Phase(name, (), epochs=epochs), [policy.batch] * (len(fed.samples.rows[number].train) // policy.batch * epochs))]
        for rows in fed.samples.order(number, fed.round_number + 1 if round_number is None else round_number, schedule):
            optimiser.zero_grad()
            F.cross_entropy(net(fed.samples.x[rows]), fed.samples.y[rows]).backward()
            optimiser.step()
    return net


def close(actual: dict[str, torch.Tensor], net: TinyNet, prefix: str = "") -> None:
    values = net.state_dict()
    assert actual
    for k, v in actual.items():
        if k.startswith(prefix):
            torch.testing.assert_close(v, values[k], atol=1e-5, rtol=1e-4, msg=k)
