"""MoEx in plain loops (METHODS 7.21): moments of a partner at one stage, gradients through them, λCE(y) + (1 − λ)CE(y_π)."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, recorded, same_model, sgd, shares

from consilience.core.federation import Federation

SETTINGS = {"ImageNet": (1, 0.9, 1.0, "pono"), "CIFAR": (2, 0.5, 0.25, "pono"), "ModelNet": (1, 0.9, 0.5, "instance")}


@pytest.mark.parametrize("row", SETTINGS)
def test_moex(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, lam, p, moments = SETTINGS[row]
    fed = federation(f"moex(stage={stage}, lam={lam}, p={p}, moments={moments})", norm=row != "CIFAR")
    plans = recorded(monkeypatch, Federation, "plans")
    server, tossed = net(row != "CIFAR"), []
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        trained = {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for (x, y), on, order in zip(batches(fed, i, t), plan["moex"]["on"], plan["moex"]["order"], strict=True):
                partner, h = order[: len(x)], x
                tossed.append(bool(on))
                for number in (1, 2):
                    h = getattr(local, f"stage{number}")(h)
                    if on and number == stage:
                        over = (1,) if moments == "pono" else (2, 3)
                        m = h.mean(over, keepdim=True)
                        s = (h.var(over, unbiased=True, keepdim=True) + 1e-5).sqrt()
                        h = (h - m) / s * s[partner] + m[partner]
                logits = local.head(local.header(local.neck(h)))
                loss = F.cross_entropy(logits, y)
                if on:
                    loss = lam * loss + (1 - lam) * F.cross_entropy(logits, y[partner])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
    assert any(tossed)
    assert all(tossed) == (p == 1.0)
