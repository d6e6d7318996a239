"""FedDyn in plain loops (METHODS 7.5): linear and quadratic term, h_i on the clients, h on the server, uniform weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares, weights_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_feddyn(momentum: float) -> None:
    alpha = 0.3
    fed = federation(f"feddyn(alpha={alpha})", momentum=momentum)
    server = net()
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    h, own = dict(zero), {i: dict(zero) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, moved = weights_of(server), {}, dict(zero)
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters(), momentum)
            for x, y in batches(fed, i, t):
                loss = F.cross_entropy(local(x), y)
                for k, p in local.named_parameters():                                # − <h_i, w> + α/2 |w − wᵗ|²
                    loss = loss - (own[i][k] * p).sum() + alpha / 2 * (p - start[k]).square().sum()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            end = weights_of(local)
            own[i] = {k: own[i][k] - alpha * (end[k] - start[k]) for k in h}
            moved = {k: moved[k] + end[k] - start[k] for k in h}
            trained[i] = local.state_dict()
        h = {k: h[k] - alpha / len(SIZES) * moved[k] for k in h}                     # 1/N
        mean = average(trained, shares(cohort, uniform=True))
        server.load_state_dict({**mean, **{k: mean[k] - h[k] / alpha for k in h}})
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.server["dyn"]["h"], {k: v / alpha for k, v in h.items()})     # a run stores them divided by α
        for i in cohort:
            same_numbers(fed.client(i).tensors["kept"]["dyn"]["h"], {k: v / alpha for k, v in own[i].items()})
