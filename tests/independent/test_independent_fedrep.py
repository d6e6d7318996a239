"""FedRep in plain loops (METHODS 7.28): the head alone, then the base alone, an optimiser each; the head stays with its client."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares


def test_fedrep() -> None:
    head_epochs = 3
    fed = federation(f"fedrep(head_epochs={head_epochs})")
    first, second = fed.phases
    server = net()
    heads = {i: copy.deepcopy(server.head.state_dict()) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            local.head.load_state_dict(heads[i])
            base = [p for k, p in local.named_parameters() if not k.startswith("head.")]
            for phase, params in ((first, list(local.head.parameters())), (second, base)):
                optimiser = sgd(params)
                for x, y in batches(fed, i, t, [phase]):
                    local.zero_grad()
                    F.cross_entropy(local(x), y).backward()
                    optimiser.step()
            heads[i] = copy.deepcopy(local.head.state_dict())
            trained[i] = local.state_dict()
        mean = average(trained, shares(cohort))
        server.load_state_dict({k: v if k.startswith("head.") else mean[k] for k, v in server.state_dict().items()})
        fed.round(cohort)
        same_model(fed.model, server)                                                # whose head never moves
        for i in range(len(SIZES)):
            same_numbers(fed.personal_model(i)[0]["params"], {f"head.{k}": v for k, v in heads[i].items()})
