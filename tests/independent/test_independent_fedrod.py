"""FedRoD in plain loops (METHODS 7.29): balanced softmax for base and generic head, a personal head on the constant sum."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, LR, SIZES, average, batches, federation, frozen, net, same_model, same_numbers, samples, sgd, shares


@pytest.mark.parametrize(("gamma", "norm"), [(1.0, True), (0.5, True), (1.0, False)])
def test_fedrod(gamma: float, norm: bool) -> None:
    fed = federation(f"fedrod(gamma={gamma})", norm)
    server = net(norm)
    own = {i: copy.deepcopy(server.head) for i in range(len(SIZES))}
    missing = 0
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, head = copy.deepcopy(server), own[i]
            optimiser, plainly = sgd(local.parameters()), torch.optim.SGD(head.parameters(), LR)
            count = torch.bincount(samples(fed, i)[1], minlength=CLASSES).double()
            missing += int((count == 0).sum())
            for x, y in batches(fed, i, t):
                z = local.features(x)
                g = local.head(z)
                weighed = count**gamma * g.exp()                                     # n_c^γ exp(g_c): 0 for a class that is not there
                loss = -(weighed.gather(1, y[:, None]).squeeze(1) / weighed.sum(1)).log().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                plainly.zero_grad()
                F.cross_entropy(g.detach() + head(z.detach()), y).backward()         # features and g as they were before the step
                plainly.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        x, still = samples(fed, 1)[0], frozen(server)
        for i in range(len(SIZES)):
            kept = fed.client(i).tensors["personal"]["rod"]["head"]
            same_numbers({k.removeprefix("head."): v for k, v in kept.items()}, own[i].state_dict())
            model, taps = fed.personal_model(i)
            z = still.features(x)
            same_numbers({"logits": fed.look(i, fed.client(i), model, x, False, taps).logits},
                         {"logits": (still.head(z) + own[i](z)).detach()})
    assert missing
