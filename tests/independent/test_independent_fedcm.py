"""FedCM in plain loops (METHODS 7.14): v = αg + (1 − α)Δ; Δ is the mean over clients of their change per length of path,
and so moves the model: clients weigh the same in both.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, average, batches, federation, net, same_model, same_numbers, sgd, shares, weights_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedcm(momentum: float) -> None:
    alpha = 0.3
    fed = federation(f"fedcm(alpha={alpha})", momentum=momentum)
    server = net()
    direction = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, directions = weights_of(server), {}, []
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters(), momentum)
            velocity = length = 0.0
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                if t > 1:                                                            # plain steps in the first round
                    for k, p in local.named_parameters():
                        p.grad = alpha * p.grad + (1 - alpha) * direction[k]
                optimiser.step()
                velocity = momentum * velocity + 1
                length += LR * velocity                                              # ηK_i without momentum
            directions.append({k: (start[k] - w) / length for k, w in weights_of(local).items()})
            trained[i] = local.state_dict()
        direction = {k: sum(d[k] for d in directions) / len(cohort) for k in direction}
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))      # η_g = 1: averaging, with the mean of Δ
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.shared["cm"]["direction"], direction)
