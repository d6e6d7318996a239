"""MOON in plain loops (METHODS 7.7): the previous model is that of the client's last round, however long ago; none, no term."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, average, batches, federation, frozen, net, same_numbers, sgd, shares
from torch import nn


@pytest.mark.parametrize("projection", [0, 6])
def test_moon(projection: int) -> None:
    mu, tau = 2.0, 0.5
    fed = federation(f"moon(mu={mu}, tau={tau}, projection={projection})")
    server = net()
    if projection:                                                                   # d → d, ReLU, d → 6, then the head
        values = {k: v for k, v in fed.model["params"].items() if k not in dict(server.named_parameters()) or k.startswith("head.")}
        server.head = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 6), nn.Linear(6, CLASSES))
        ordered = [v for k, v in values.items() if "moon" in k] + [v for k, v in values.items() if "moon" not in k]
        for p, v in zip(server.head.parameters(), ordered, strict=True):
            p.data.copy_(v)

    def split(model, x):
        z = model.features(x)
        if projection:
            z = model.head[:3](z)
        return z, (model.head[3] if projection else model.head)(z)

    previous = {}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, received = copy.deepcopy(server), frozen(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                z, logits = split(local, x)
                loss = F.cross_entropy(logits, y)
                if i in previous:
                    near = F.cosine_similarity(z, split(received, x)[0]) / tau
                    far = F.cosine_similarity(z, split(previous[i], x)[0]) / tau
                    loss = loss - mu * torch.log(near.exp() / (near.exp() + far.exp())).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i], previous[i] = local.state_dict(), frozen(local)
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        if projection:
            ours = [*(v for k, v in fed.model["params"].items() if "moon" in k),
                    *(v for k, v in fed.model["params"].items() if k.startswith("head.") and "moon" not in k)]
            for a, b in zip(ours, server.head.parameters(), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-9)
        body = {k: v for k, v in server.state_dict().items() if not projection or not k.startswith("head.")}
        same_numbers({**fed.model["params"], **fed.model["buffers"]}, body)
