"""FedDecorr in plain loops (METHODS 7.15): β·‖K‖²_F/d² of the correlations K of a batch's features, pair by pair."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, net, same_model, sgd, shares
from torch import Tensor


def penalty(z: Tensor, scale: str) -> Tensor:
    """paper: the mean of K² over all pairs; official: the batch's size times its mean over pairs of different dimensions."""
    n, d = z.shape
    deviation = ((z - z.mean(0)).pow(2).sum(0) / (n - 1) + 1e-8).sqrt()
    scores = [(z[:, j] - z[:, j].mean()) / deviation[j] for j in range(d)]
    square = {(j, k): ((scores[j] * scores[k]).sum() / n) ** 2 for j in range(d) for k in range(d)}
    if scale == "paper":
        return torch.stack(list(square.values())).sum() / d**2
    return n * torch.stack([s for (j, k), s in square.items() if j != k]).mean()


@pytest.mark.parametrize("scale", ["paper", "official"])
def test_feddecorr(scale: str) -> None:
    beta = 0.3
    fed = federation(f"feddecorr(beta={beta}, scale={scale})")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                z = local.features(x)
                optimiser.zero_grad()
                (F.cross_entropy(local.head(z), y) + beta * penalty(z, scale)).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
