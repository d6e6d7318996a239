"""APPLE in plain loops (METHODS 7.33): autograd through θ = Σ_j p_ij θ_j to the own core and to the weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, RHO, SIZES, batches, federation, net, same_model, same_numbers, weights_of
from torch.func import functional_call

EVERYBODY = [0, 1, 2, 3]


@pytest.mark.parametrize("cohorts", [[EVERYBODY] * 4, COHORTS], ids=["everybody", "named"])
@pytest.mark.parametrize(("schedule", "fade", "norm"), [("exponential", 3, True), ("cosine", 3, False)])
def test_apple(schedule: str, fade: int, norm: bool, cohorts: list[list[int]]) -> None:
    rate, mu = 0.02, 0.4
    fed = federation(f"apple(weights_lr={rate}, mu={mu}, fade={fade}, schedule={schedule})", norm, weight_decay=0.0)
    n = len(SIZES)
    share = torch.tensor([s / sum(SIZES) for s in SIZES])
    known = [weights_of(net(norm)) for _ in range(n)]                                # the server's cores
    own = {i: net(norm) for i in range(n)}                                           # core and statistics of every client
    p = {i: share.clone() for i in range(n)}
    served = {i: net(norm) for i in range(n)}
    for t, cohort in enumerate(cohorts, start=1):
        sent = {}
        done = (t - 1) / fade
        level = 0.0 if t > fade else 0.001**done if schedule == "exponential" else (1 + math.cos(math.pi * done)) / 2
        for i in cohort:
            core = {k: w.clone().requires_grad_() for k, w in weights_of(own[i]).items()}
            weight = p[i].clone().requires_grad_()
            mixed = lambda core=core, weight=weight, i=i: {
                k: sum(weight[j] * (core[k] if j == i else known[j][k]) for j in range(n)) for k in core}
            optimiser = torch.optim.SGD(core.values(), LR, momentum=RHO)
            slow = torch.optim.SGD([weight], rate)
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                slow.zero_grad()
                loss = F.cross_entropy(functional_call(own[i], mixed(), (x,)), y) + level * mu * (weight - share).square().sum()
                loss.backward()
                optimiser.step()
                slow.step()
            p[i], sent[i] = weight.detach(), {k: w.detach() for k, w in core.items()}
            served[i] = copy.deepcopy(own[i])                                        # its statistics, and the mixture that it trained
            served[i].load_state_dict({**served[i].state_dict(), **{k: w.detach() for k, w in mixed().items()}})
            own[i].load_state_dict({**own[i].state_dict(), **sent[i]})
        for i, one in sent.items():
            known[i] = one
        fed.round(cohort)
        for i in range(n):
            same_model(fed.personal_model(i)[0], served[i])
            same_numbers(fed.client(i).tensors["local"], own[i].state_dict())
        for i in cohort:
            same_numbers(fed.client(i).tensors["kept"]["apple"], {"p": p[i]})
