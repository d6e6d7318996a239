"""Per-FedAvg in plain loops (METHODS 7.24): the gradient after a step of adaptation, HF by a central difference; adapted before use."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, DECAY, LR, RHO, SIZES, Net, average, batches, federation, net, same_model, sgd, shares
from torch import Tensor

from consilience.core.part import Phase

DELTA = 0.01


def slope(model: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def moved(model: Net, by: list[Tensor], rate: float) -> Net:
    """A copy at w + rate·by, whose statistics are thrown away."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p, g in zip(other.parameters(), by):
            p += rate * g
    return other


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("order", "alpha", "adapt"), [("first", 1.0, 1), ("first", 4.0, 3), ("hessian_free", 2.0, 1)])
def test_perfedavg(order: str, alpha: float, adapt: int, norm: bool) -> None:
    fed = federation(f"perfedavg(order={order}, alpha={alpha}, adapt={adapt}, delta={DELTA})", norm)
    pieces, server, rate = 3 if order == "hessian_free" else 2, net(norm), alpha * LR
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                (x1, x2, *more), (y1, y2, *_) = x.tensor_split(pieces), y.tensor_split(pieces)
                assert len(x1) + len(x2) + sum(map(len, more)) == len(x)
                first = slope(local, x1, y1)                                          # the pass that moves statistics
                g = slope(moved(local, first, -rate), x2, y2)
                if order == "hessian_free":
                    x3, y3 = more[0], y.tensor_split(pieces)[2]
                    up, down = slope(moved(local, g, DELTA), x3, y3), slope(moved(local, g, -DELTA), x3, y3)
                    g = [a - rate * (u - d) / (2 * DELTA) for a, u, d in zip(g, up, down)]
                for p, a in zip(local.parameters(), g):
                    p.grad = a
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):
            own = copy.deepcopy(server)
            optimiser = torch.optim.SGD(own.parameters(), rate, momentum=RHO, weight_decay=DECAY)
            for x, y in batches(fed, i, t, [Phase(fed.plain_phase.name, (), epochs=adapt)])[:adapt]:
                optimiser.zero_grad()
                F.cross_entropy(own(x), y).backward()
                optimiser.step()
            same_model(fed.personal_model(i)[0], own)
