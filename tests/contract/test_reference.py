"""A federation equals an ordinary loop: modules, backward, torch.optim.SGD, with prox and SCAFFOLD added by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core.federation import Federation
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.testing import SIZES, tiny_federation, tiny_net

CLIENTS = (0, 1, 3)              # client 2 has five samples, too few for a batch: no step, no weight
LR, RHO, DECAY, MU = 0.05, 0.9, 1e-3, 0.1


def orders(fed: Federation, number: int, round_number: int) -> Tensor:
    """The rows of samples of a client's steps, as the federation draws them."""
    return fed.samples.order(number, round_number, fed.samples.schedule(number, fed.phases))


def loop(fed: Federation, rounds: int, corrected: bool, weights: dict[int, float]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The server's state dict and SCAFFOLD's c after `rounds` rounds."""
    server = tiny_net()
    zeros = {k: torch.zeros_like(p) for k, p in server.named_parameters()}
    c, own = dict(zeros), {i: dict(zeros) for i in CLIENTS}
    for number in range(1, rounds + 1):
        start = {k: p.detach().clone() for k, p in server.named_parameters()}
        trained, change = {}, dict(zeros)
        for i in CLIENTS:
            net = tiny_net()
            net.load_state_dict(server.state_dict())
            opt = torch.optim.SGD(net.parameters(), LR, momentum=RHO, weight_decay=DECAY)      # anew in every round
            batches = orders(fed, i, number)
            for rows in batches:
                opt.zero_grad()
                loss = F.cross_entropy(net(fed.samples.x[rows]), fed.samples.y[rows])
                if corrected:
                    loss = loss + MU / 2 * sum((p - start[k]).square().sum() for k, p in net.named_parameters())
                loss.backward()
                if corrected:
                    for k, p in net.named_parameters():
                        assert p.grad is not None
                        p.grad += c[k] - own[i][k]
                opt.step()
            # With momentum the j-th step moves a constant unit gradient by η(1 − ρ^j)/(1 − ρ): add them up one by one.
            length = sum(LR * (1 - RHO**j) / (1 - RHO) for j in range(1, len(batches) + 1))
            new = {k: own[i][k] - c[k] + (start[k] - p.detach()) / length for k, p in net.named_parameters()}
            change = {k: change[k] + new[k] - own[i][k] for k in change}
            own[i], trained[i] = new, net.state_dict()
        c = {k: c[k] + change[k] / len(SIZES) for k in c}
        averaged: dict[str, Any] = {k: sum(weights[i] * trained[i][k] for i in CLIENTS) if v.is_floating_point()
                                    else max(trained[i][k] for i in CLIENTS) for k, v in server.state_dict().items()}
        server.load_state_dict(averaged)
    return server.state_dict(), c


def assert_near(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    for k, v in theirs.items():
        torch.testing.assert_close(mine[k], v, rtol=1e-3, atol=atol, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_fedavg_with_momentum_decay_and_batchnorm(weights: str) -> None:
    total = sum(SIZES[i] for i in CLIENTS)
    share = {i: SIZES[i] / total if weights == "samples" else 1 / 3 for i in CLIENTS}
    fed = tiny_federation(weights=weights)
    state, _ = loop(fed, 2, False, share)
    for _ in range(2):
        fed.round()
    assert_near({**fed.model["params"], **fed.model["buffers"]}, state, 2e-5)


def test_prox_and_scaffold_together() -> None:
    fed = tiny_federation([Prox(mu=MU), Scaffold()])
    state, c = loop(fed, 3, True, dict.fromkeys(CLIENTS, 1 / 3))
    for _ in range(3):
        fed.round()
    assert_near({**fed.model["params"], **fed.model["buffers"]}, state, 5e-5)
    assert_near(fed.shared["scaffold"]["c"], c, 2e-4)
    assert max(float(v.abs().max()) for v in c.values()) > 1e-2


def test_a_client_without_a_step_keeps_its_state_and_has_no_weight() -> None:
    fed = tiny_federation([Scaffold()])
    report = fed.round()
    assert report.idle == [2]
    assert [i for i, _ in fed.clients.visited()] == [0, 1, 3]
    assert fed.client(2).first
    assert not fed.client(0).first
