"""Manifold Mixup in plain loops (METHODS 7.22): input or stage by lot, one λ and one permutation a step, for states and labels."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, recorded, same_model, sgd, shares

from consilience.core.federation import Federation


@pytest.mark.parametrize(("settings", "layers"), [("", [0, 1, 2]), ("layers=[2, 1], alpha=0.4", [2, 1])])
def test_manifold_mixup(settings: str, layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(f"manifold_mixup({settings})")
    plans = recorded(monkeypatch, Federation, "plans")
    server, seen = net(), set()
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        trained = {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            drawn = plan["manifold_mixup"]
            for (x, y), weights, order in zip(batches(fed, i, t), drawn["weight"], drawn["order"], strict=True):
                place = int(weights.argmin())                                        # λ stands at the step's layer, 1 elsewhere
                layer, lam, partner, h = layers[place], float(weights[place]), order[: len(x)], x
                seen.add(layer)
                for number in (0, 1, 2):
                    h = getattr(local, f"stage{number}")(h) if number else h
                    if number == layer:
                        h = lam * h + (1 - lam) * h[partner]
                logits = local.head(local.header(local.neck(h)))
                loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[partner])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
    assert seen == set(layers)
