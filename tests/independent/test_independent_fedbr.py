"""FedBR in plain loops (Alg. 1, eq. 3–7; METHODS 1.2, 1.3): max step on the projection, min step on the model, uniform averages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import (
    CLASSES,
    COHORTS,
    Net,
    attached,
    average,
    batches,
    federation,
    frozen,
    net,
    recorded,
    same_model,
    same_numbers,
    sgd,
    shares,
)
from torch import Tensor, nn

from consilience import rng

ROWS = {                                                     # Table 4 and the sweeps
    "whole": {},
    "eq. 5 divides": {"projection": "released", "temperature": "divide"},
    "component 1": {"projection": "released", "mu": 0.0, "lam": 0.7},
    "+ min step": {"projection": "released", "max_step": False},
    "component 2": {"projection": "released", "lam": 0.0, "tau2": 0.5},
    "w/o max step": {"projection": "released", "lam": 0.0, "max_step": False},
    "released P": {"projection": "released"},
    "no P": {"projection": "none"},
    "once": {"projection": "released", "refresh": "once"},
}


def projection(kind: str) -> nn.Module:
    h, o = {"paper": (256, 128), "released": (14, 7), "none": (0, 0)}[kind]
    return nn.Sequential(nn.Linear(7, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o)) if h else nn.Identity()


@pytest.mark.parametrize(("row", "momentum"), [*((row, 0.9) for row in ROWS), ("released P", 0.0)])
def test_fedbr(row: str, momentum: float) -> None:
    options = ROWS[row]
    text = ", ".join(f"{k}={str(v).lower()}" for k, v in options.items())
    mu, lam = options.get("mu", 0.5), options.get("lam", 1.0)
    a1, a2 = options.get("tau1", 2.0), options.get("tau2", 2.0)
    if options.get("temperature") == "divide":
        a1, a2 = 1 / a1, 1 / a2
    kind = options.get("projection", "paper")
    climbs = mu > 0 and options.get("max_step", True) and kind != "none"
    fed = federation(f"fedbr({text})", norm=False, momentum=momentum)
    server, server_p = net(norm=False), attached(fed, "debias", projection(kind))

    def contrast(p: nn.Module, zp: Tensor, zg: Tensor, z: Tensor) -> Tensor:
        f1 = torch.exp(a1 * F.cosine_similarity(p(zp), p(zg)))                       # eq. 5
        f2 = torch.exp(a2 * F.cosine_similarity(p(zp), p(z)))                        # eq. 6
        return -torch.log(f1 / (f1 + f2)).mean()                                     # eq. 7

    for t, cohort in enumerate(COHORTS, start=1):
        fed.round(cohort)
        pseudo = fed.shared["debias"]["pseudo"]                                      # D_p of this round, |D_p| = B
        models, projections = {}, {}
        for i in cohort:
            local, p, received = copy.deepcopy(server), copy.deepcopy(server_p), frozen(server)
            optimiser = sgd(local.parameters(), momentum)
            climber = sgd(p.parameters(), momentum, decay=0.0) if climbs else None
            for x, y in batches(fed, i, t):
                n = len(x)                                                           # a smaller last batch meets the first of D_p
                z, zp, zg = local.features(x), local.features(pseudo), received.features(pseudo)
                if climber is not None:                                              # Alg. 1, line 8
                    climber.zero_grad()
                    (-contrast(p, zp[:n].detach(), zg[:n], z.detach())).backward()
                    climber.step()
                uniform = -F.log_softmax(local.head(zp), 1).sum(1).mean() / CLASSES  # cross-entropy with 1/C
                loss = F.cross_entropy(local.head(z), y) + lam * uniform + mu * contrast(p, zp[:n], zg[:n], z)  # eq. 3
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            models[i], projections[i] = local.state_dict(), p.state_dict()
        server.load_state_dict(average(models, shares(cohort, uniform=True)))        # Alg. 1: 1/M each
        server_p.load_state_dict(average(projections, shares(cohort, uniform=True)))
        same_model(fed.model, server)
        mine = [v for k, v in fed.model["params"].items() if k.startswith("debias.")]
        for ours, theirs in zip(mine, server_p.parameters(), strict=True):
            same_numbers({"P": ours}, {"P": theirs.detach()})


@pytest.mark.parametrize("mix", [0, 1, 2])
def test_mixture(mix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 4 at every step with samples of that step's batch; z_g belongs to the same mixture. With BatchNorm, pseudo-data have statistics
    of their own, which leave no trace in the model's."""
    fed = federation(f"fedbr(pseudo=mixture, mix={mix}, projection=none, lam=0.3)")
    proxy = fed.shared["debias"]["pseudo"].clone()
    draws = recorded(monkeypatch, rng, "integers")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        draws.clear()
        fed.round(cohort)
        torch.testing.assert_close(fed.shared["debias"]["pseudo"], proxy)                # drawn once
        drawn, models = iter(draws), {}
        for i in cohort:
            local, received = copy.deepcopy(server), frozen(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                n, hot = len(x), F.one_hot(y, CLASSES)
                picked = next(drawn) if mix else torch.zeros(8, 0, dtype=torch.int64)
                assert picked.shape == (8, mix)
                xp = (proxy + x[picked].sum(1)) / (mix + 1)                              # eq. 4
                q = (1 / CLASSES + hot[picked].sum(1)) / (mix + 1)
                z, zp, zg = local.features(x), copied(local).features(xp), received.features(xp)
                near, far = 2 * F.cosine_similarity(zp[:n], zg[:n]), 2 * F.cosine_similarity(zp[:n], z)
                contrast = -torch.log(near.exp() / (near.exp() + far.exp())).mean()
                pseudo = -(q * F.log_softmax(local.head(zp), 1)).sum(1).mean()
                optimiser.zero_grad()
                (F.cross_entropy(local.head(z), y) + 0.3 * pseudo + 0.5 * contrast).backward()
                optimiser.step()
            models[i] = local.state_dict()
        server.load_state_dict(average(models, shares(cohort, uniform=True)))
        same_model(fed.model, server)


def copied(model: Net) -> Net:
    """The same parameters, statistics of its own."""
    twin = copy.deepcopy(model)
    for (name, p) in model.named_parameters():
        owner, _, last = name.rpartition(".")
        twin.get_submodule(owner)._parameters[last] = p
    return twin
