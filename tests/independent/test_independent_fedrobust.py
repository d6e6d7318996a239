"""FedRobust in plain loops (METHODS 7.18): every client's Λ and δ ascend, then the model descends on what they make of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, RHO, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares


@pytest.mark.parametrize(("weight", "ascent", "norm"), [(1.0, 1.0, True), (0.1, 3.0, False)])
def test_fedrobust(weight: float, ascent: float, norm: bool) -> None:
    fed = federation(f"fedrobust(weight={weight}, ascent={ascent})", norm)
    server = net(norm)
    own = {i: [torch.eye(1, requires_grad=True), torch.zeros(1, requires_grad=True)] for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, (matrix, offset) = copy.deepcopy(server), own[i]
            optimiser = sgd(local.parameters())
            uphill = torch.optim.SGD(own[i], ascent * LR, momentum=RHO, maximize=True)
            for x, y in batches(fed, i, t):
                judge = copy.deepcopy(local)                                         # its statistics are thrown away
                paid = weight * ((matrix - torch.eye(1)).square().sum() + offset.square().sum())
                uphill.zero_grad()
                (F.cross_entropy(judge(matrix * x + offset), y) - paid).backward()   # one channel: Λ is 1×1
                uphill.step()
                optimiser.zero_grad()
                F.cross_entropy(local(matrix.detach() * x + offset.detach()), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))
        fed.round(cohort)
        same_model(fed.model, server)
        for i, (matrix, offset) in own.items():
            same_numbers(fed.client(i).tensors["personal"]["affine"], {"matrix": matrix.detach(), "offset": offset.detach()})
