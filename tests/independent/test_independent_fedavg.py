"""FedAvg in plain loops: partial participation, unequal sizes, smaller last batches, momentum, weight decay, BatchNorm."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, sgd, shares


@pytest.mark.parametrize(("weights", "norm"), [("samples", True), ("uniform", False)])
def test_fedavg(weights: str, norm: bool) -> None:
    fed = federation("fedavg", norm, weights=weights)
    server = net(norm)
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort, weights == "uniform")))
        fed.round(cohort)
        same_model(fed.model, server)
