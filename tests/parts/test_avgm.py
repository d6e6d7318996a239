"""FedAvgM: the server's recursion by hand, and running statistics left out of it."""

from __future__ import annotations

import pytest
import torch
from quadratic import scalars, weight

from consilience import tree
from consilience.parts.avgm import Avgm
from consilience.testing import tiny_federation


@pytest.mark.parametrize(("settings", "first", "second"), [
    # Δ₁ = 0.2.                              Δ₂ = 0.1·(2 − w₁), v₂ = βv₁ + Δ₂
    ({"beta": 0.5}, 0.2, 0.2 + 0.5 * 0.2 + 0.18),
    # dampened: v₁ = ½·0.2 = 0.1, w₁ = 0.1;  v₂ = ½·0.1 + ½·0.19 = 0.145
    ({"beta": 0.5, "dampened": True}, 0.1, 0.1 + 0.145),
    # server_lr 2: v₁ = 0.2, w₁ = 0.4;       v₂ = 0.1 + 0.16 = 0.26, w₂ = 0.4 + 0.52. The step scales v, it is not stored in it.
    ({"beta": 0.5, "server_lr": 2.0}, 0.4, 0.4 + 0.52),
])
def test_recursion_by_hand(settings, first, second):
    fed = scalars([Avgm(**settings)], [1.0, 3.0], [1, 1])
    fed.round()
    assert weight(fed) == pytest.approx(first, abs=1e-6)
    fed.round()
    assert weight(fed) == pytest.approx(second, abs=1e-6)


def test_momentum_carries_on_where_the_mean_change_is_zero():
    # w⁰ = 2 is the fixed point of the average. With v = 0 nothing moves; after a kick by another cohort it does.
    fed = scalars([Avgm(beta=0.5)], [1.0, 3.0], [1, 1], start=2.0)
    fed.round()
    assert weight(fed) == pytest.approx(2.0)
    fed.round([1])                                              # Δ = 0.1·(3 − 2) = 0.1 = v
    fed.round([0, 1])                                           # v = 0.05 + 0.1·(2 − 2.1) = 0.04
    assert weight(fed) == pytest.approx(2.14, abs=1e-6)


def test_statistics_are_averaged_and_never_pushed():
    fed = tiny_federation([Avgm(beta=0.9)])
    fed.round()
    plain = tiny_federation()                                    # one round of FedAvg from the same model, with the same draws
    plain.model, plain.round_number = tree.clone(fed.model), 1
    before, v = tree.clone(fed.model), tree.clone(fed.server["avgm"]["v"])
    fed.round()
    plain.round()
    for k, b in plain.model["buffers"].items():
        assert torch.equal(fed.model["buffers"][k], b)
    for k, w in plain.model["params"].items():                   # w + βv + Δ
        torch.testing.assert_close(fed.model["params"][k], before["params"][k] + 0.9 * v[k] + (w - before["params"][k]))
