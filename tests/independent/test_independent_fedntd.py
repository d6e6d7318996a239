"""FedNTD in plain loops (METHODS 7.13): βτ² KL of the received model's not-true classes, batch mean."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, average, batches, federation, frozen, net, same_model, sgd, shares


def test_fedntd() -> None:
    beta, tau = 1.5, 2.0
    fed = federation(f"fedntd(beta={beta}, tau={tau})")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, received = copy.deepcopy(server), frozen(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                logits, before = local(x), received(x)
                term = 0.0
                for b, true in enumerate(y.tolist()):
                    others = [c for c in range(CLASSES) if c != true]
                    q, log_p = F.softmax(before[b, others] / tau, 0), F.log_softmax(logits[b, others] / tau, 0)
                    term = term + (q * (torch.log(q) - log_p)).sum()
                optimiser.zero_grad()
                (F.cross_entropy(logits, y) + beta * tau**2 * term / len(y)).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
