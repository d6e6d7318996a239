"""FedProx in plain loops (METHODS 7.3): (μ/2)‖w − wᵗ‖², squared, inside the gradient that momentum and decay see."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, sgd, shares, weights_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedprox(momentum: float) -> None:
    mu = 0.7
    fed = federation(f"fedprox(mu={mu})", momentum=momentum)
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        trained, start = {}, weights_of(server)
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters(), momentum)
            for x, y in batches(fed, i, t):
                loss = F.cross_entropy(local(x), y)
                loss = loss + mu / 2 * sum((p - start[k]).square().sum() for k, p in local.named_parameters())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
