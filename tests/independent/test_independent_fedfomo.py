"""FedFomo in plain loops (METHODS 7.32): gains per distance on held-back samples, measured from the model before the last training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, SIZES, batches, federation, net, same_model, same_numbers, sgd
from torch import Tensor, nn


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("download", [1, 2, 5])
def test_fedfomo(download: int) -> None:
    fed = federation(f"fedfomo(download={download})", norm=False)
    n = len(SIZES)
    own, before = {i: net(norm=False) for i in range(n)}, {i: net(norm=False) for i in range(n)}
    store: dict[int, nn.Module] = {}
    affinity = torch.eye(n)
    for t, cohort in enumerate((*COHORTS, [1, 3], [0, 1, 2]), start=1):
        sent, gains = {}, torch.zeros(n, n)
        for i in cohort:
            held = fed.samples.rows[i].reserved
            assert len(held) == SIZES[i] // 5                                        # a fifth, never trained on
            x, y = fed.samples.x[held], fed.samples.y[held]
            loss = lambda m, x=x, y=y: F.cross_entropy(m(x), y).detach()
            others = sorted((k for k in store if k != i), key=lambda k: (-affinity[i, k].item(), k))[:download]
            candidates = {**{k: store[k] for k in others}, i: own[i]}
            if others and len(held):
                for k, m in candidates.items():
                    gains[i, k] = (loss(before[i]) - loss(m)) / ((flat(m) - flat(before[i])).norm() + 1e-5)
            weight = gains[i].clamp(min=0)
            if weight.sum() > 0:
                weight = weight / weight.sum()
                mixed = {name: sum(weight[k] * m.state_dict()[name] for k, m in candidates.items()) for name in own[i].state_dict()}
                own[i] = copy.deepcopy(own[i])
                own[i].load_state_dict(mixed)
            before[i], local = copy.deepcopy(own[i]), copy.deepcopy(own[i])
            optimiser = sgd(local.parameters())
            for bx, by in batches(fed, i, t):
                optimiser.zero_grad()
                F.cross_entropy(local(bx), by).backward()
                optimiser.step()
            own[i] = sent[i] = local
        store.update(sent)
        affinity = affinity + gains
        fed.round(cohort)
        for i in range(n):
            same_model(fed.personal_model(i)[0], own[i])
        away = 1 - torch.eye(n)                                                      # nobody is sent a model of his own
        same_numbers({"P": fed.server["fomo"]["affinity"] * away}, {"P": affinity * away})
