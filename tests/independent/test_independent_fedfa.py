"""FedFA in plain loops (Alg. 1 and 2, eq. 2–9; METHODS 4.1–4.3): an FFA layer after each stage, variances over clients on the server."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import average, batches, federation, net, recorded, same_model, same_numbers, sgd, shares
from torch import Tensor

from consilience import rng

COHORTS = ([0, 1], [1], [1, 2, 3], [0, 2], [0, 1, 2, 3])       # one of them has a single client
CHANNELS, P, ALPHA, EPS = {"stage1": 4, "stage2": 5}, 0.5, 0.9, 1e-6
Stats = dict[str, tuple[Tensor, Tensor]]                     # per stage: of the means, of the standard deviations

SETTINGS = {
    "paper": {},
    "biased": {"unbiased": False},
    "Alg. 1 resets": {"stats": "reset"},
    "release averages": {"stats": "averaged", "sharing": "scalar"},
    "averaged, per channel": {"stats": "averaged"},
    "direct fusion": {"sharing": "direct"},
    "FedFA-C": {"sharing": "none"},
    "FedFA-R": {"sharing": "random"},
    "one stage": {"stages": "[2]"},
    "corrected for the start": {"bias_correct": True, "p": 1.0},
}


def layer(x: Tensor, draws: dict[str, Any], shared: tuple[Tensor, Tensor], stats: tuple[Tensor, Tensor], sharing: str,
          unbiased: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    if not draws["coin"] < draws["p"]:                                                            # Alg. 2, line 1
        return x, stats
    mu = x.mean((2, 3))                                                                  # eq. 2
    sigma = (x.var((2, 3), unbiased=unbiased) + EPS).sqrt()
    new = tuple(ALPHA * old + (1 - ALPHA) * s.detach().mean(0) for old, s in zip(stats, (mu, sigma)))        # eq. 4
    spread = []
    for s, between in zip((mu, sigma), shared):
        v = s.var(0, unbiased=unbiased) + EPS                                            # eq. 3
        r = 1 / (1 + 1 / (between + EPS))
        gamma = len(v) * r / r.sum()                                                     # eq. 6
        fused = {"per_channel": (gamma + 1) * v, "scalar": 2 * v, "direct": (between + 1) * v, "none": v,      # eq. 7
                 "random": torch.full_like(v, 0.25)}[sharing]
        spread.append(fused.sqrt())
    new_mu, new_sigma = mu + draws["mu"] * spread[0], sigma + draws["sigma"] * spread[1]                     # eq. 9
    normal = (x - mu[:, :, None, None]) / sigma[:, :, None, None]
    return normal * new_sigma[:, :, None, None] + new_mu[:, :, None, None], new          # eq. 8


@pytest.mark.parametrize("row", SETTINGS)
def test_fedfa(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = SETTINGS[row]
    sharing, kept, unbiased = how.get("sharing", "per_channel"), how.get("stats", "kept"), how.get("unbiased", True)
    stages = ["stage2"] if "stages" in how else ["stage1", "stage2"]
    norm = row not in ("paper", "corrected for the start")
    options = {"p": P, "momentum": ALPHA} | how
    batch = 6 if row == "corrected for the start" else 8                                 # 19 = 3·6 + 1: a batch of one sample
    fed = federation("fedfa(" + ", ".join(f"{k}={str(v).lower()}" for k, v in options.items()) + ")", norm, batch=batch)
    uniforms, normals = recorded(monkeypatch, rng, "uniform"), recorded(monkeypatch, rng, "box_muller")
    server = net(norm)
    fresh: Stats = {s: (torch.zeros(CHANNELS[s]), torch.ones(CHANNELS[s])) for s in stages}
    between: Stats = {s: (torch.ones(CHANNELS[s]), torch.ones(CHANNELS[s])) for s in stages}
    own: dict[int, Stats] = {}
    updates = dict.fromkeys(range(4), 0)
    mean_of_all = fresh
    for t, cohort in enumerate(COHORTS, start=1):
        uniforms.clear()
        normals.clear()
        fed.round(cohort)
        drawn = iter([{"p": options["p"], "coin": u[0], "mu": n[0], "sigma": n[1]} for u, n in zip(uniforms, normals, strict=True)])
        trained, sent = {}, {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            stats = dict({"kept": own.get(i, fresh), "reset": fresh, "averaged": mean_of_all}[kept])         # Alg. 1, line 3
            for x, y in batches(fed, i, t):
                h = x
                for name in ("stage1", "stage2"):
                    h = getattr(local, name)(h)
                    if name in stages and len(x) > 1:                                    # one sample has no variance
                        h, stats[name] = layer(h, next(drawn), between[name], stats[name], sharing, unbiased)
                updates[i] += len(x) > 1
                optimiser.zero_grad()
                F.cross_entropy(local.head(local.header(local.neck(h))), y).backward()
                optimiser.step()
            trained[i], own[i], sent[i] = local.state_dict(), stats, stats
            if "bias_correct" in how:                                                    # they started at 0 and 1, with weight αⁿ left
                left = ALPHA ** updates[i]
                sent[i] = {s: (m / (1 - left), (d - left) / (1 - left)) for s, (m, d) in stats.items()}
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))           # eq. 1: 1/M each
        for s in stages:
            together = [torch.stack([sent[i][s][n] for i in cohort]) for n in (0, 1)]
            mean_of_all = {**mean_of_all, s: (together[0].mean(0), together[1].mean(0))}
            if len(cohort) > 1:                                                          # eq. 5, per channel; one client says nothing
                between[s] = tuple((m - m.mean(0)).square().mean(0) for m in together)
        same_model(fed.model, server)
        for s in stages:
            if sharing in ("per_channel", "direct"):
                same_numbers(fed.shared["ffa"]["variance"][s], dict(zip(("mean", "std"), between[s])))
            if kept == "kept":
                for i in own:
                    same_numbers(fed.client(i).tensors["kept"]["ffa"]["stats"][s], dict(zip(("mean", "std"), own[i][s])))
