"""FedPer in plain loops (METHODS 7.27): base and head train together, and the head stays with its client."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares


def test_fedper() -> None:
    fed = federation("fedper")
    server = net()
    heads = {i: copy.deepcopy(server.head.state_dict()) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            local.head.load_state_dict(heads[i])
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            heads[i] = copy.deepcopy(local.head.state_dict())
            trained[i] = local.state_dict()
        mean = average(trained, shares(cohort))
        server.load_state_dict({k: v if k.startswith("head.") else mean[k] for k, v in server.state_dict().items()})
        fed.round(cohort)
        same_model(fed.model, server)                                                # whose head never moves
        for i in range(len(SIZES)):
            served = fed.personal_model(i)[0]["params"]
            same_numbers(served, {f"head.{k}": v for k, v in heads[i].items()})
            same_numbers(served, {k: p for k, p in server.named_parameters() if not k.startswith("head.")})
