"""DANN in plain loops (METHODS 7.11): the discriminator learns the client's number, then features and classifier deceive the new one."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from plain import COHORTS, SIZES, attached, average, batches, federation, net, same_model, sgd, shares
from torch import nn


def test_dann() -> None:
    weight = 0.4
    fed = federation(f"dann(weight={weight}, hidden=6)")
    server = net()
    judge = attached(fed, "dann", nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, len(SIZES))))
    for t, cohort in enumerate(COHORTS, start=1):
        trained, judges = {}, {}
        for i in cohort:
            local, d = copy.deepcopy(server), copy.deepcopy(judge)
            optimiser, own = sgd(local.parameters()), sgd(d.parameters(), decay=0.0)
            for x, y in batches(fed, i, t):
                z, me = local.features(x), torch.full_like(y, i)
                own.zero_grad()
                F.cross_entropy(d(z.detach()), me).backward()
                own.step()
                optimiser.zero_grad()
                (F.cross_entropy(local.head(z), y) - weight * F.cross_entropy(d(z), me)).backward()
                optimiser.step()
            trained[i], judges[i] = local.state_dict(), d.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        judge.load_state_dict(average(judges, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        ours = [v for k, v in fed.model["params"].items() if k.startswith("dann.")]
        for a, b in zip(ours, judge.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-9)
