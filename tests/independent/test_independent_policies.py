"""FedAvg in plain loops under the run's policies: kept optimisers, Adam, statistics that stay, other batches, a schedule, lost clients."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, DECAY, LR, RHO, SIZES, average, batches, federation, net, same_model, shares

SETTINGS = {
    "kept momentum": {"optimiser_state": "kept"},
    "adam": {"optimiser": "adam", "momentum": 0.0},
    "kept adam": {"optimiser": "adam", "momentum": 0.0, "optimiser_state": "kept"},
    "parameters only": {"batchnorm": "params"},
    "a number of steps": {"steps": 5},
    "with replacement": {"sampling": "replacement", "steps": 3},
    "cosine": {"schedule": "cosine(rounds=6)"},
    "lost clients": {"dropout": 0.5},
    "batches of one are left out": {"batch": 6},                     # 19 = 3·6 + 1: one sample has no statistics
}


@pytest.mark.parametrize("row", SETTINGS)
def test_policies(row: str) -> None:
    how = SETTINGS[row]
    fed = federation("fedavg", **how)
    server, lost = net(), []
    optimisers: dict[int, torch.optim.Optimizer] = {}
    slots = {i: net() for i in range(len(SIZES))}                                    # a client's own module, for what stays there
    for t, cohort in enumerate((*COHORTS, [0, 1, 2, 3], [2, 3]), start=1):
        lr = LR * (1 + math.cos(math.pi * (t - 1) / 6)) / 2 if row == "cosine" else LR
        report = fed.round(cohort)
        lost += report.lost
        trained = {}
        for i in (k for k in cohort if k not in report.lost):
            local = slots[i]
            stays = {k: v.clone() for k, v in local.named_buffers()} if row == "parameters only" else {}
            local.load_state_dict({**server.state_dict(), **stays})
            if i not in optimisers or how.get("optimiser_state") != "kept":
                optimisers[i] = (torch.optim.Adam(local.parameters(), lr, weight_decay=DECAY) if "adam" in row else
                                 torch.optim.SGD(local.parameters(), lr, momentum=RHO, weight_decay=DECAY))
            drawn = batches(fed, i, t)
            if row == "batches of one are left out":
                assert len(drawn) == 2 * (SIZES[i] // 6 + (SIZES[i] % 6 > 1))
            for x, y in drawn:
                optimisers[i].zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimisers[i].step()
            trained[i] = copy.deepcopy(local.state_dict())
        if trained:
            mean = average(trained, shares(trained))
            kept = dict(server.named_buffers()) if row == "parameters only" else {}
            server.load_state_dict({**mean, **kept})
        same_model(fed.model, server)
        if row == "parameters only":
            for i in range(len(SIZES)):
                ours = fed.personal_model(i)[0]["buffers"]
                for k, v in slots[i].named_buffers():
                    torch.testing.assert_close(ours[k], v, rtol=0, atol=1e-9)
    assert (row == "lost clients") == bool(lost)
