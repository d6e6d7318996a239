"""SCAFFOLD, option II, in plain loops (METHODS 7.4): variates survive absence, 1/N on the server, uniform weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares, weights_of


@pytest.mark.parametrize(("momentum", "divisor", "server_lr"), [(0.0, "path", 1.0), (0.9, "path", 0.7), (0.9, "steps", 1.0)])
def test_scaffold(momentum: float, divisor: str, server_lr: float) -> None:
    fed = federation(f"scaffold(divisor={divisor}, server_lr={server_lr})", momentum=momentum)
    server = net()
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    c, own = dict(zero), {i: dict(zero) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, change = weights_of(server), {}, []
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters(), momentum)
            velocity = length = 0.0
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                for k, p in local.named_parameters():
                    p.grad += c[k] - own[i][k]                                       # g − c_i + c
                optimiser.step()
                velocity = momentum * velocity + 1                                   # how far a gradient of 1 is carried by this step
                length += LR * (velocity if divisor == "path" else 1)
            end = weights_of(local)
            new = {k: own[i][k] - c[k] + (start[k] - end[k]) / length for k in c}    # option II
            change.append({k: new[k] - own[i][k] for k in c})
            own[i], trained[i] = new, local.state_dict()
        c = {k: c[k] + sum(d[k] for d in change) / len(SIZES) for k in c}            # 1/N, not 1/|S|
        mean = average(trained, shares(cohort, uniform=True))
        server.load_state_dict({**mean, **{k: start[k] + server_lr * (mean[k] - start[k]) for k in start}})
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers(fed.shared["scaffold"]["c"], c)
        for i in cohort:
            same_numbers(fed.client(i).tensors["kept"]["scaffold"]["c"], own[i])
