"""VHL in plain loops (METHODS 7.12): 2C outputs, virtual images beside every batch, contrasts in the first epochs of a round."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, attached, average, batches, federation, net, recorded, same_model, same_numbers, sgd, shares
from torch import Tensor, nn

from consilience import rng

ALPHA, ALIGN, CONTRAST, TAU = 0.7, 0.4, 0.3, 0.2


def supcon(z: Tensor, y: Tensor) -> Tensor:
    """Mean over anchors of −log softmax at others of the class; an anchor without any counts 0."""
    z, losses = F.normalize(z, dim=1), []
    for i in range(len(z)):
        others = torch.arange(len(z)) != i
        log_share = (z[others] @ z[i] / TAU).log_softmax(0)
        of_its_class = y[others] == y[i]
        losses.append(-log_share[of_its_class].mean() if of_its_class.any() else log_share.sum() * 0)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("norm", [True, False])
def test_vhl(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation(f"vhl(alpha={ALPHA}, align={ALIGN}, contrast={CONTRAST}, tau={TAU}, images=14, virtual_batch=6, align_epochs=1)", norm)
    virtual, classes = fed.shared["vhl"]["x"].clone(), fed.shared["vhl"]["y"]
    server, more = net(norm), attached(fed, "vhl", nn.Linear(7, CLASSES))
    drawn = recorded(monkeypatch, rng, "integers")
    for t, cohort in enumerate(COHORTS, start=1):
        fed.round(cohort)
        steps = iter(drawn)
        trained, outputs = {}, {}
        for i in cohort:
            local, extra = copy.deepcopy(server), copy.deepcopy(more)
            optimiser = sgd([*local.parameters(), *extra.parameters()])
            todo = batches(fed, i, t)
            for number, (x, y) in enumerate(todo):
                v = next(steps)
                beside = copy.deepcopy(local)                                        # its statistics are thrown away
                for ours, theirs in zip(beside.parameters(), local.parameters()):
                    ours.data = theirs.data                                          # the same weights, gradients added below
                z, z_virtual = local.features(x), beside.features(virtual[v])
                loss = F.cross_entropy(torch.cat([local.head(z), extra(z)], 1), y)
                loss = loss + ALPHA * F.cross_entropy(torch.cat([beside.head(z_virtual), extra(z_virtual)], 1), classes[v] + CLASSES)
                if number < len(todo) // 2:                                          # the first of two epochs
                    loss = loss + ALIGN * supcon(torch.cat([z, z_virtual.detach()]), torch.cat([y, classes[v]]))
                    loss = loss + CONTRAST * supcon(z_virtual, classes[v])
                optimiser.zero_grad()
                loss.backward()
                for ours, theirs in zip(beside.parameters(), local.parameters()):
                    theirs.grad += ours.grad
                optimiser.step()
            trained[i], outputs[i] = local.state_dict(), extra.state_dict()
        assert next(steps, None) is None
        drawn.clear()
        server.load_state_dict(average(trained, shares(cohort)))
        more.load_state_dict(average(outputs, shares(cohort)))
        same_model(fed.model, server)
        same_numbers(fed.model["params"], {f"vhl.{k}": w for k, w in more.state_dict().items()})
    assert torch.equal(virtual, fed.shared["vhl"]["x"])
