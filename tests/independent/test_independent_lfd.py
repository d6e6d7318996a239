"""LfD in plain loops (eq. 3, 8–10; METHODS 2.1, 2.2): cosine head with margin, labels against the client's own drift."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, frozen, net, same_model, sgd, shares
from torch import Tensor, nn

TAU, MARGIN = 0.1, 0.15


class Cosine(nn.Module):
    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows.clone())

    def forward(self, u: Tensor) -> Tensor:                                         # c_j = <u/|u|, W_j/|W_j|>
        return (u / u.norm(dim=1, keepdim=True)) @ (self.weight / self.weight.norm(dim=1, keepdim=True)).T


READINGS = {
    "defaults": {},
    "first rounds have uniform labels": {"first": "uniform"},
    "no margin in the regulariser": {"margin_in_reg": False},
    "tempered drift": {"drift_tau": 0.5},
    "half the weight": {"weight": 0.5, "first": "uniform"},
}


@pytest.mark.parametrize(("reading", "norm"), [*((reading, True) for reading in READINGS), ("defaults", False)])
def test_lfd(reading: str, norm: bool) -> None:
    options = READINGS[reading]
    fed = federation("cosine+drift(" + ", ".join(f"{k}={str(v).lower()}" for k, v in options.items()) + ")", norm)
    server = net(norm)
    (rows,) = [v for k, v in fed.model["params"].items() if k.startswith("head.")]
    server.head = Cosine(rows)
    previous: dict[int, nn.Module] = {}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, f_g = copy.deepcopy(server), frozen(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                c = local(x)
                margin = torch.zeros_like(c)
                for b, label in enumerate(y.tolist()):
                    margin[b, label] = MARGIN
                with_margin = F.log_softmax((c - margin) / TAU, 1)                  # eq. 6: margin in training only
                inside = with_margin if options.get("margin_in_reg", True) else F.log_softmax(c / TAU, 1)
                loss = -torch.stack([with_margin[b, label] for b, label in enumerate(y.tolist())]).mean()
                label = None
                if i in previous:
                    drift = F.log_softmax(previous[i](x) / TAU, 1) - F.log_softmax(f_g(x) / TAU, 1)      # eq. 3
                    label = F.softmax(-drift / options.get("drift_tau", 1.0), 1)
                elif options.get("first") == "uniform":
                    label = torch.full_like(c, 1 / c.shape[1])
                if label is not None:
                    loss = loss - options.get("weight", 1.0) * (label * inside).sum(1).mean()            # eq. 8, 10
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i], previous[i] = local.state_dict(), frozen(local)             # its last model, however long ago
        server.load_state_dict(average(trained, shares(cohort)))                    # eq. 2
        fed.round(cohort)
        same_model(fed.model, server)
