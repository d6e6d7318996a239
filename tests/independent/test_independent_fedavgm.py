"""FedAvgM in plain loops (METHODS 7.2): v ← βv + Δ, w ← w − η_s v, over parameters alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, same_numbers, sgd, shares, weights_of


@pytest.mark.parametrize("dampened", [False, True])
def test_fedavgm(dampened: bool) -> None:
    beta, server_lr = 0.6, 0.8
    fed = federation(f"fedavgm(beta={beta}, server_lr={server_lr}, dampened={str(dampened).lower()})")
    server = net()
    v = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    for t, cohort in enumerate(COHORTS, start=1):
        trained, start = {}, weights_of(server)
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        mean = average(trained, shares(cohort))
        v = {k: beta * v[k] + (1 - beta if dampened else 1) * (start[k] - mean[k]) for k in v}
        server.load_state_dict({**mean, **{k: start[k] - server_lr * v[k] for k in v}})
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.server["avgm"]["v"], {k: -w for k, w in v.items()})                 # a run counts changes as w_i − wᵗ
