"""Corrections beside methods that train in phases, in plain loops: a path is as long as the steps that moved the parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, RHO, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares, weights_of


def is_head(name: str) -> bool:
    return name.startswith("head.")


@pytest.mark.parametrize("correction", ["scaffold", "scaffold(divisor=steps)", "fednova", "fedcm(alpha=0.4)"])
@pytest.mark.parametrize("personal", ["fedrep(head_epochs=3)", "ditto(epochs=3)"])
def test_corrections_beside_phases(personal: str, correction: str) -> None:
    fed = federation(f"{personal}+{correction}")
    server = net()
    own = {i: net() for i in range(len(SIZES))}
    stays = is_head if "fedrep" in personal else (lambda name: False)
    zero = {k: torch.zeros_like(p) for k, p in server.named_parameters() if not stays(k)}      # what travels and trains
    c, variate, direction = dict(zero), {i: dict(zero) for i in own}, dict(zero)
    for t, cohort in enumerate(COHORTS, start=1):
        start, trained, change, directions, a = weights_of(server), {}, dict(zero), dict(zero), {}
        for i in cohort:
            local = copy.deepcopy(server)
            local.load_state_dict({k: own[i].state_dict()[k] if stays(k) else v for k, v in server.state_dict().items()})
            velocity = a[i] = 0.0
            for phase in fed.phases:
                model = own[i] if phase.name == "ditto" else local
                chosen = {k: p for k, p in model.named_parameters() if phase.name != {True: "base", False: "head"}[is_head(k)]}
                optimiser = sgd(chosen.values())
                for x, y in batches(fed, i, t, [phase]):
                    model.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    if phase.name == "ditto":
                        loss = loss + 0.05 * sum((p - start[k]).square().sum() for k, p in model.named_parameters())
                    loss.backward()
                    if phase.name in ("main", "base"):                               # where what is uploaded trains
                        for k, p in chosen.items():
                            if "scaffold" in correction:
                                p.grad += c[k] - variate[i][k]
                            if "fedcm" in correction and t > 1:
                                p.grad = 0.4 * p.grad + 0.6 * direction[k]
                        velocity = RHO * velocity + 1
                        a[i] += 1 if "steps" in correction else velocity
                    optimiser.step()
            walked = {k: (start[k] - w) / (LR * a[i]) for k, w in weights_of(local).items() if k in zero}
            new = {k: variate[i][k] - c[k] + walked[k] for k in zero}
            change = {k: change[k] + new[k] - variate[i][k] for k in zero}
            directions = {k: directions[k] + walked[k] for k in zero}
            variate[i], trained[i] = new, local.state_dict()
            if "fedrep" in personal:
                own[i].load_state_dict(trained[i])
        c = {k: c[k] + change[k] / len(SIZES) for k in zero}
        direction = {k: directions[k] / len(cohort) for k in zero}
        p = shares(cohort, uniform="fednova" not in correction)
        mean = average(trained, p)
        if correction == "fednova":
            effective = sum(p[i] * a[i] for i in cohort)
            mean |= {k: start[k] - effective * sum(p[i] * (start[k] - trained[i][k]) / a[i] for i in cohort) for k in zero}
        server.load_state_dict({k: v if stays(k) else mean[k] for k, v in server.state_dict().items()})
        fed.round(cohort)
        same_model(fed.model, server)
        if "scaffold" in correction:
            same_numbers(fed.shared["scaffold"]["c"], c)
        if "fedcm" in correction:
            same_numbers(fed.shared["cm"]["direction"], direction)
