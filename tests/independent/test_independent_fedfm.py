"""FedFM in plain loops (Alg. 1, eq. 8–11 and the guiding loss; METHODS 3.1–3.3), with classes that nobody has yet, and FedFM-Lite."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, average, batches, federation, frozen, net, same_model, same_numbers, samples, sgd, shares
from torch import Tensor, nn

OWNED = ((0, 1), (0, 1), (1, 2), (0, 3))                     # classes 2 and 3 are nobody's in the first round
LAMBDA, TAU, START = 5.0, 0.1, 1


class Anchors:
    """What the server knows: an anchor for every class that was ever seen."""

    def __init__(self) -> None:
        self.a: dict[int, Tensor] = {}

    def update(self, local: dict[int, dict[int, tuple[Tensor, int]]], uniform: bool) -> None:
        """local[k][c] = (a_kc, n_kc)."""
        new = {}
        for c in range(CLASSES):
            owners = [k for k in local if c in local[k]]
            if not owners:                                                           # nobody has it: what was known stays
                continue
            if not uniform:                                                          # eq. 9
                new[c] = sum(local[k][c][1] * local[k][c][0] for k in owners) / sum(local[k][c][1] for k in owners)
            else:                                                                    # who lacks it gives the last global anchor
                some = local[owners[0]][c][0]
                parts = [local[k][c][0] if c in local[k] else self.a.get(c, torch.zeros_like(some)) for k in local]
                new[c] = sum(parts) / len(parts)
        self.a.update(new)

    def loss(self, h: Tensor, y: Tensor, mode: str) -> Tensor:
        if mode == "guide":                                                          # one softmax over the classes that have an anchor
            known = sorted(self.a)
            towards = F.normalize(torch.stack([self.a[c] for c in known]))
            target = torch.tensor([known.index(c) for c in y.tolist()])
            return F.cross_entropy(F.normalize(h) @ towards.T / TAU, target)
        own = torch.stack([self.a[c] for c in y.tolist()])
        if mode == "eq. 3":
            return (h - own).square().sum(1).mean()
        return (F.normalize(h) - F.normalize(own)).square().mean()


def class_means(model: nn.Module, x: Tensor, y: Tensor) -> dict[int, tuple[Tensor, int]]:
    h = frozen(model).features(x)
    return {c: (h[y == c].mean(0), int((y == c).sum())) for c in y.unique().tolist()}        # eq. 8


SETTINGS = {"guide": "", "eq. 3": ", mode=l2, normalise=false, l2_reduction=sum", "released l2": ", mode=l2"}


@pytest.mark.parametrize(("aggregation", "norm"), [("weighted", True), ("uniform", False)])
@pytest.mark.parametrize("mode", SETTINGS)
def test_fedfm(mode: str, aggregation: str, norm: bool) -> None:
    weight = 0.05 if mode == "eq. 3" else LAMBDA                                     # raw squares are large
    fed = federation(f"fedfm(weight={weight}, start={START}, aggregation={aggregation}{SETTINGS[mode]})", norm, OWNED)
    server, anchors = net(norm), Anchors()
    for t, cohort in enumerate(COHORTS, start=1):
        anchors.update({k: class_means(server, *samples(fed, k)) for k in cohort}, aggregation == "uniform")
        trained = {}
        for k in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, k, t):
                h = local.features(x)
                loss = F.cross_entropy(local.head(h), y)
                if t > START:                                                        # exactly T_s plain rounds
                    loss = loss + weight * anchors.loss(h, y, mode)                  # eq. 10
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[k] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))                     # eq. 11
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers({str(c): fed.shared["anchors"]["anchor"][c] for c in anchors.a}, {str(c): a for c, a in anchors.a.items()})
        assert fed.shared["anchors"]["seen"].tolist() == [c in anchors.a for c in range(CLASSES)]


@pytest.mark.parametrize("mode", ["guide", "released l2"])
def test_anchors_of_the_round_before(mode: str) -> None:
    """As released: last round's clients look at the new model. Samples of a class without an anchor have no term."""
    fed = federation(f"fedfm(weight={LAMBDA}, start=0, clients=previous{SETTINGS[mode]})", True, OWNED, participation=2.0)
    server, anchors, before = net(), Anchors(), []
    without = 0
    for t in range(1, 6):
        cohort = fed.cohort(t)
        anchors.update({k: class_means(server, *samples(fed, k)) for k in before}, uniform=False)
        trained = {}
        for k in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, k, t):
                h = local.features(x)
                loss = F.cross_entropy(local.head(h), y)
                known = [b for b, c in enumerate(y.tolist()) if c in anchors.a]
                if known:
                    loss = loss + LAMBDA * anchors.loss(h[known], y[known], mode) * len(known) / len(y)      # a mean over the batch
                without += t > 1 and len(known) < len(y)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[k] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round()
        before = cohort
        same_model(fed.model, server)
    assert without


@pytest.mark.parametrize("every", [1, 2, 3])
def test_lite(every: int) -> None:
    """Anchors of the trained models, in every round; models every so many rounds after the plain ones."""
    full = ((0, 1, 2, 3),) * 4                                                       # everybody knows all classes
    cohorts = ([0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2])
    fed = federation(f"fedfm(weight={LAMBDA}, start={START}, lite=true, every={every})", True, full)
    server, anchors = net(), Anchors()
    own: dict[int, nn.Module] = {}                                                   # models trained since the last exchange
    for t, cohort in enumerate(cohorts, start=1):
        trained, local_anchors = {}, {}
        for k in cohort:
            local = copy.deepcopy(own.get(k, server))
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, k, t):
                h = local.features(x)
                loss = F.cross_entropy(local.head(h), y)
                if t > START:
                    loss = loss + LAMBDA * anchors.loss(h, y, "guide")
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            own[k], trained[k] = local, local.state_dict()
            local_anchors[k] = class_means(local, *samples(fed, k))
        anchors.update(local_anchors, uniform=False)
        if t <= START or (t - START) % every == 0:
            server.load_state_dict(average(trained, shares(cohort)))
            own = {}
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers({str(c): fed.shared["anchors"]["anchor"][c] for c in anchors.a}, {str(c): a for c, a in anchors.a.items()})
