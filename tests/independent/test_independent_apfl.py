"""APFL in plain loops (METHODS 7.31): w by ℓ(w); v and α by the gradient of ℓ(αv + (1 − α)w), w as it was before the step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares
from torch.func import functional_call


@pytest.mark.parametrize(("alpha", "adapt", "norm"),
                         [(0.5, "step", True), (0.9, "step", False), (0.3, "round", True), (0.6, "never", True)])
def test_apfl(alpha: float, adapt: str, norm: bool) -> None:
    fed = federation(f"apfl(alpha={alpha}, adapt={adapt})", norm)
    server = net(norm)
    own, served = {i: net(norm) for i in range(len(SIZES))}, {i: net(norm) for i in range(len(SIZES))}
    mix = {i: torch.tensor(alpha) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, v = copy.deepcopy(server), own[i]
            optimiser = sgd(local.parameters())
            for step, (x, y) in enumerate(batches(fed, i, t)):
                a = mix[i].clone().requires_grad_()
                both = {k: a * p + (1 - a) * w.detach() for (k, p), w in zip(v.named_parameters(), local.parameters())}
                loss = F.cross_entropy(functional_call(v, {**both, **dict(v.named_buffers())}, (x,)), y)     # moves v's statistics
                *slopes, slope = torch.autograd.grad(loss, [*v.parameters(), a])
                with torch.no_grad():
                    for p, g in zip(v.parameters(), slopes):
                        p -= LR * g
                if adapt == "step" or (adapt == "round" and step == 0):
                    mix[i] = (mix[i] - LR * slope).clamp(0, 1)
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
            served[i] = copy.deepcopy(v)
            with torch.no_grad():
                for p, w in zip(served[i].parameters(), local.parameters()):
                    p.copy_(mix[i] * p + (1 - mix[i]) * w)
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):
            kept = fed.client(i).tensors["kept"]["apfl"]
            same_model(kept["own"], own[i])
            same_numbers(kept, {"alpha": mix[i]})
            same_model(fed.personal_model(i)[0], served[i])
    assert (adapt == "never") == all(m == alpha for m in mix.values())
