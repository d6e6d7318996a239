"""FedNTD: the divergence by hand, and the gather that leaves the true class out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from one_step import ONE, check_step, next_batch, plain_net

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines import Sequential
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts.mixup import Mixup
from consilience.parts.ntd import Ntd, without_true
from consilience.testing import TinyNet, tiny_federation, tiny_population


def test_gather_by_hand():
    logits = torch.tensor([[10.0, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    assert without_true(logits, torch.tensor([0, 3, 1])).tolist() == [[11, 12, 13], [20, 21, 22], [30, 32, 33]]


@given(st.integers(2, 7), st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_gather_drops_exactly_the_true_entry(classes, labels):
    y = torch.tensor([label % classes for label in labels])
    logits = torch.arange(len(y) * classes).reshape(len(y), classes)
    for row, kept, label in zip(logits.tolist(), without_true(logits, y).tolist(), y.tolist()):
        assert kept == [v for c, v in enumerate(row) if c != label]


def divergence(fixed, local, y, tau):
    """τ² KL(softmax(g̃/τ) ‖ softmax(l̃/τ)), mean over the batch, in loops over numbers."""
    total = 0.0
    for g, z, label in zip(fixed, local, y):
        rest = [c for c in range(len(g)) if c != label]
        p = [math.exp(g[c] / tau) for c in rest]
        q = [math.exp(z[c] / tau) for c in rest]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        total += sum(a * math.log(a / b) for a, b in zip(p, q))
    return tau**2 * total / len(y)


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.5, 3.0)])
def test_loss_against_numbers(beta, tau):
    fed, plain = tiny_federation([Ntd(beta=beta, tau=tau)], **ONE), tiny_federation(**ONE)
    for f in (fed, plain):
        f.round([0])
        f.round([0])
    fed.model = plain.model                                     # both start round three from the same model
    x, y = next_batch(fed, 0)
    # The received model in evaluation mode; the trained one in training mode, where BatchNorm uses the batch.
    with torch.no_grad():
        fixed, local = plain_net(fed.model, train=False)(x).tolist(), plain_net(fed.model)(x).tolist()
    expected = beta * divergence(fixed, local, y.tolist(), tau)
    assert expected > 1e-4
    assert fed.round([0]).losses[0] - plain.round([0]).losses[0] == pytest.approx(expected, rel=2e-3, abs=2e-6)


def test_gradient_against_plain_modules():
    fed = tiny_federation([Ntd(beta=2.0, tau=2.0)], **ONE)
    fed.round([0])
    frozen = plain_net(fed.model, train=False)

    def term(net: TinyNet, x, y):
        keep = torch.ones(len(y), 3, dtype=torch.bool)
        keep[torch.arange(len(y)), y] = False
        q = (net(x)[keep].reshape(len(y), 2) / 2).log_softmax(1)
        p = (frozen(x).detach()[keep].reshape(len(y), 2) / 2).log_softmax(1)
        return 2.0 * 4.0 * (p.exp() * (p - q)).sum(1).mean()
    assert check_step(fed, 0, term) > 0


def test_refusals():
    with pytest.raises(RefusedCombination, match=r"mixup has soft labels, and ntd needs the one true class"):
        tiny_federation([Ntd(), Mixup()])
    with pytest.raises(ConfigError, match=r"ntd needs at least three classes"):
        Federation(TinyNet(2), Layout(), Method([Ntd()]), tiny_population(classes=2), Policy(), Sequential)
