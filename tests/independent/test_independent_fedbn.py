"""FedBN and FedPer in plain loops (METHODS 7.17, 7.27): what stays on a client, and everything else averaged; a late client starts anew."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, sgd, shares

STAYS = {"fedbn": ("stage1.1.", "stage2.1."), "fedper": ("head.",), "fedbn+fedper": ("stage1.1.", "stage2.1.", "head.")}


@pytest.mark.parametrize("method", STAYS)
def test_what_stays_on_a_client(method: str) -> None:
    fed = federation(method)
    server = net()
    local_keys = [k for k in server.state_dict() if k.startswith(STAYS[method])]
    own = {i: {k: server.state_dict()[k].clone() for k in local_keys} for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            local.load_state_dict({**server.state_dict(), **own[i]})
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
            own[i] = {k: trained[i][k].clone() for k in local_keys}
        mean = average(trained, shares(cohort))
        server.load_state_dict({k: v if k in local_keys else mean[k] for k, v in server.state_dict().items()})
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):                                                  # the server's model with the client's own keys
            served = copy.deepcopy(server)
            served.load_state_dict({**server.state_dict(), **own[i]})
            same_model(fed.personal_model(i)[0], served)
