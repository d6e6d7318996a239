"""Mixup in plain loops (METHODS 7.9): one λ ~ Beta(a, a) a step, partners from the same batch, λCE(y) + (1 − λ)CE(y_perm)."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, recorded, same_model, sgd, shares

from consilience.parts.mixup import Mixup


def test_mixup(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation("mixup(alpha=0.8)")
    plans = recorded(monkeypatch, Mixup, "plan")                                     # of each client: a λ and partners for every step
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        trained = {}
        for i, plan in zip(cohort, plans, strict=True):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for (x, y), lam, order in zip(batches(fed, i, t), plan["weight"].tolist(), plan["order"], strict=True):
                partner = order[: len(x)]
                assert sorted(partner.tolist()) == list(range(len(x)))               # of this batch, each once
                logits = local(lam * x + (1 - lam) * x[partner])
                loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[partner])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server, 1e-6)                                          # λ is planned in single precision
