"""FedNova in plain loops (METHODS 7.6): changes per length of the path, put together and stretched by τ_eff = Σ p_i a_i."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, sgd, shares, weights_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova(momentum: float) -> None:
    fed = federation("fednova", momentum=momentum)
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, direction, a = weights_of(server), {}, {}, {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters(), momentum)
            velocity = a[i] = 0.0
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
                velocity = momentum * velocity + 1
                a[i] += velocity                                                     # a_i: K_i without momentum
            direction[i] = {k: (start[k] - w) / a[i] for k, w in weights_of(local).items()}       # d_i = Δ_i / a_i
            trained[i] = local.state_dict()
        p = shares(cohort)
        effective = sum(p[i] * a[i] for i in cohort)
        new = {k: start[k] - effective * sum(p[i] * direction[i][k] for i in cohort) for k in start}
        server.load_state_dict({**average(trained, p), **new})                       # statistics by plain averaging
        fed.round(cohort)
        same_model(fed.model, server)
