"""FedProto in plain loops (METHODS 7.34 and 3.8): prototypes of the last epoch, uniform over owners; models that stay, or are averaged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import (
    CLASSES,
    COHORTS,
    SIZES,
    average,
    batches,
    federation,
    frozen,
    net,
    recorded,
    same_model,
    same_numbers,
    samples,
    sgd,
    shares,
)
from torch import Tensor

from consilience.parts.mixup import Mixup

OWNED = ((0, 1), (0, 1), (1, 2), (0, 3))                     # classes 2 and 3 are nobody's in the first round


def pulled(h: Tensor, y: Tensor, proto: dict[int, Tensor]) -> Tensor:
    """MSE over samples and dimensions to the class's prototype; a sample without one is compared with itself."""
    return F.mse_loss(h, torch.stack([proto.get(c, row.detach()) for row, c in zip(h, y.tolist())]))


@pytest.mark.parametrize("averaged", [False, True], ids=["fedproto", "generalised"])
@pytest.mark.parametrize(("collect", "aggregation", "norm"), [("epoch", "uniform", True), ("round", "weighted", False),
                                                              ("trained", "weighted", True)])
def test_fedproto(averaged: bool, collect: str, aggregation: str, norm: bool) -> None:
    weight = 0.7
    method = "proto" if averaged else "fedproto"
    fed = federation(f"{method}(weight={weight}, collect={collect}, aggregation={aggregation})", norm, OWNED)
    server, own = net(norm), {i: net(norm) for i in range(len(SIZES))}
    proto: dict[int, Tensor] = {}
    for t, cohort in enumerate(COHORTS, start=1):
        means: dict[int, list[tuple[float, Tensor]]] = {c: [] for c in range(CLASSES)}
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server) if averaged else own[i]
            optimiser, shown = sgd(local.parameters()), []
            steps = batches(fed, i, t)
            for x, y in steps:
                h = local.features(x)
                loss = F.cross_entropy(local.head(h), y) + weight * pulled(h, y, proto)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                shown.append((h.detach(), y))
            if collect == "epoch":
                shown = shown[len(steps) // 2:]                                      # of two epochs
            if collect == "trained":
                x, y = samples(fed, i)
                shown = [(frozen(local).features(x), y)]
            h, y = (torch.cat(some) for some in zip(*shown))
            for c in y.unique().tolist():
                means[c].append((float((y == c).sum()) if aggregation == "weighted" else 1.0, h[y == c].mean(0)))
            trained[i] = local.state_dict()
        proto.update({c: sum(n * m for n, m in some) / sum(n for n, _ in some) for c, some in means.items() if some})
        if averaged:
            server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_numbers({str(c): fed.shared["proto"]["proto"][c] for c in proto}, {str(c): p for c, p in proto.items()})
        assert fed.shared["proto"]["seen"].tolist() == [float(c in proto) for c in range(CLASSES)]
        if averaged:
            same_model(fed.model, server)
        else:
            for i in range(len(SIZES)):
                same_model(fed.personal_model(i)[0], own[i])
    assert len(proto) == CLASSES


def test_mixed_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """METHODS 10.6: the term of both labels by their parts, and prototypes likewise."""
    weight = 0.7
    fed = federation(f"mixup(alpha=0.8)+proto(weight={weight}, aggregation=weighted)")
    plans = recorded(monkeypatch, Mixup, "plan")
    server, proto = net(), {}
    for t, cohort in enumerate(COHORTS, start=1):
        plans.clear()
        fed.round(cohort)
        total, count, trained = torch.zeros(CLASSES, 7), torch.zeros(CLASSES), {}
        for i, draws in zip(cohort, plans):
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            steps = batches(fed, i, t)
            for n, (x, y) in enumerate(steps):
                a, order = draws["weight"][n], draws["order"][n][: len(x)]
                h = local.features(a * x + (1 - a) * x[order])
                parts = a * F.one_hot(y, CLASSES).double() + (1 - a) * F.one_hot(y[order], CLASSES).double()
                apart = sum(parts[:, c] * (h - p).square().mean(1) for c, p in proto.items()) if proto else torch.zeros(len(x))
                loss = F.cross_entropy(local.head(h), parts) + weight * apart.mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if n >= len(steps) // 2:
                    total, count = total + parts.T @ h.detach(), count + parts.sum(0)
            trained[i] = local.state_dict()
        proto.update({c: total[c] / count[c] for c in range(CLASSES) if count[c] > 0})
        server.load_state_dict(average(trained, shares(cohort)))
        same_model(fed.model, server)
        same_numbers({str(c): fed.shared["proto"]["proto"][c] for c in proto}, {str(c): p for c, p in proto.items()})
