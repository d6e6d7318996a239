"""FedSAM in plain loops (METHODS 7.16): the gradient at w + ρ g/‖g‖ goes to the run's optimiser; statistics from the first pass."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, sgd, shares


def test_fedsam() -> None:
    rho = 0.3
    fed = federation(f"fedsam(rho={rho})")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                params = list(local.parameters())
                g1 = torch.autograd.grad(F.cross_entropy(local(x), y), params)
                size = torch.sqrt(sum(g.square().sum() for g in g1)) + 1e-12
                worst = copy.deepcopy(local)                                         # its statistics are thrown away
                with torch.no_grad():
                    for p, g in zip(worst.parameters(), g1):
                        p += rho * g / size
                g2 = torch.autograd.grad(F.cross_entropy(worst(x), y), list(worst.parameters()))
                for p, g in zip(params, g2):
                    p.grad = g
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
