"""pFedMe in plain loops (METHODS 7.25): K steps of θ on every batch, then w towards θ; θ goes on within a round and begins it at w."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, SIZES, average, batches, federation, net, same_model, shares, weights_of

RHO = 0.9


@pytest.mark.parametrize(("steps", "weight", "inner", "decay", "beta", "momentum", "norm"), [
    (5, 15.0, 0.01, 1e-3, 1.0, 0.0, True), (3, 4.0, 0.05, 0.0, 0.6, RHO, True), (1, 2.0, 0.1, 1e-2, 2.0, RHO, False)])
def test_pfedme(steps: int, weight: float, inner: float, decay: float, beta: float, momentum: float, norm: bool) -> None:
    fed = federation(f"pfedme(steps={steps}, weight={weight}, inner_lr={inner}, decay={decay}, beta={beta})", norm,
                     momentum=momentum, weight_decay=0.0)
    server = net(norm)
    own: dict[int, torch.nn.Module] = {}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            theta, w = copy.deepcopy(server), weights_of(server)
            velocity = {k: torch.zeros_like(v) for k, v in w.items()}
            for x, y in batches(fed, i, t):
                for k in range(steps):
                    statistics = copy.deepcopy(dict(theta.named_buffers()))
                    theta.zero_grad()
                    F.cross_entropy(theta(x), y).backward()
                    with torch.no_grad():
                        for name, p in theta.named_parameters():
                            p -= inner * (p.grad + weight * (p - w[name]) + decay * p)
                        if k:                                                        # statistics see every batch once
                            for name, b in theta.named_buffers():
                                b.copy_(statistics[name])
                for name, p in weights_of(theta).items():
                    velocity[name] = momentum * velocity[name] + weight * (w[name] - p)
                    w[name] = w[name] - LR * velocity[name]
            own[i], trained[i] = theta, {**theta.state_dict(), **w}
        mean = average(trained, shares(cohort))
        old = weights_of(server)
        server.load_state_dict({k: (1 - beta) * old[k] + beta * v if k in old else v for k, v in mean.items()})
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):
            same_model(fed.personal_model(i)[0], own.get(i, server))
