"""MixStyle in plain loops (METHODS 7.20): statistics of partners in the batch after both stages, constants on the way back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, recorded, same_model, sgd, shares
from torch import Tensor

from consilience.core.federation import Federation

SETTINGS = {"both stages": "p=0.7, alpha=0.3", "the second": "p=1.0, alpha=0.8, stages=[2]"}


def layer(x: Tensor, lam: Tensor, partner: Tensor) -> Tensor:
    with torch.no_grad():
        mu, sigma = x.mean((2, 3)), (x.var((2, 3), unbiased=True) + 1e-6).sqrt()
        new_mu = lam[:, None] * mu + (1 - lam[:, None]) * mu[partner]
        new_sigma = lam[:, None] * sigma + (1 - lam[:, None]) * sigma[partner]
    at = lambda s: s[:, :, None, None]
    return (x - at(mu)) / at(sigma) * at(new_sigma) + at(new_mu)


@pytest.mark.parametrize("row", SETTINGS)
def test_mixstyle(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(f"mixstyle({SETTINGS[row]})", norm=row != "the second")
    stages = ["stage1", "stage2"] if row == "both stages" else ["stage2"]
    plans = recorded(monkeypatch, Federation, "plans")
    server, mixed = net(row != "the second"), 0
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        trained = {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            on, weight, order = (plan["mixstyle"][kind] for kind in ("on", "weight", "order"))
            for step, (x, y) in enumerate(batches(fed, i, t)):
                h = x
                for name in ("stage1", "stage2"):
                    h = getattr(local, name)(h)
                    if name in stages and on[step, stages.index(name)]:
                        lam, partner = (d[step, stages.index(name), : len(x)] for d in (weight, order))
                        h = layer(h, lam, partner)
                        mixed += 1
                optimiser.zero_grad()
                F.cross_entropy(local.head(local.header(local.neck(h))), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
    assert mixed > 20
