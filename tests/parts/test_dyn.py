"""FedDyn's variates under partial participation, against the published rule written over numbers."""

from __future__ import annotations

from functools import partial

import pytest
from quadratic import W, scalars, walk, weight

from consilience.parts.dyn import Dyn
from consilience.testing import tiny_federation

TARGETS, SIZES, COHORTS = [1.0, -2.0, 4.0], [1, 2, 3], ([0, 1], [1, 2], [0], [0, 1, 2])


def test_two_rounds_by_hand():
    # a = (1, 3), one step, η = 0.1, α = 0.5, N = 2.
    # round 1: w_i = (0.1, 0.3), mean 0.2. h_i = −α(w_i − 0) = (−0.05, −0.15). h = −α·½·0.4 = −0.1. w = 0.2 + 0.1/0.5 = 0.4.
    # round 2: gradient of ½(w−a)² − h_i w + (α/2)(w−wᵗ)² at wᵗ: (0.4 − 1) + 0.05 = −0.55 → 0.455; (0.4 − 3) + 0.15 = −2.45 → 0.645.
    # mean 0.55; h = −0.1 − 0.5·½·(0.055 + 0.245) = −0.175; w = 0.55 + 0.35 = 0.9.
    fed = scalars([Dyn(alpha=0.5)], [1.0, 3.0], [1, 1])
    fed.round()
    assert weight(fed) == pytest.approx(0.4, abs=1e-6)
    fed.round()
    assert weight(fed) == pytest.approx(0.9, abs=1e-6)
    assert 0.5 * fed.server["dyn"]["h"][W].item() == pytest.approx(-0.175, abs=1e-6)      # stored divided by α
    assert [0.5 * fed.client(i).tensors["kept"]["dyn"]["h"][W].item() for i in (0, 1)] == pytest.approx(
        [-0.05 - 0.5 * 0.055, -0.15 - 0.5 * 0.245], abs=1e-6)


@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_variates_with_partial_participation(alpha):
    fed = scalars([Dyn(alpha=alpha)], TARGETS, SIZES, lr=0.05, momentum=0.5)
    w, h, own = 0.0, 0.0, [0.0, 0.0, 0.0]
    for cohort in COHORTS:
        start = w
        pull = lambda g, v, h_i, start=start: g - h_i + alpha * (v - start)
        ends = {i: walk(start, TARGETS[i], SIZES[i], 0.05, 0.5, partial(pull, h_i=own[i])) for i in cohort}
        for i in cohort:
            own[i] -= alpha * (ends[i] - start)
        h -= alpha / 3 * sum(ends[i] - start for i in cohort)    # 1/N, not 1/|S|
        w = sum(ends.values()) / len(cohort) - h / alpha
        fed.round(cohort)
        assert weight(fed) == pytest.approx(w, rel=1e-4, abs=1e-5)
        assert alpha * fed.server["dyn"]["h"][W].item() == pytest.approx(h, rel=1e-4, abs=1e-6)
        for i in range(3):
            assert alpha * fed.client(i).tensors["kept"]["dyn"]["h"][W].item() == pytest.approx(own[i], rel=1e-4, abs=1e-6)


def test_fixed_point_is_the_mean_of_the_targets():
    # FedDyn makes the local optima agree with the global one: with all clients and many steps w → mean of a_i.
    fed = scalars([Dyn(alpha=0.5)], [1.0, 5.0], [8, 8], lr=0.2)
    for _ in range(30):
        fed.round()
    assert weight(fed) == pytest.approx(3.0, abs=1e-3)


def test_weights_are_uniform_unless_the_run_says_otherwise():
    assert tiny_federation([Dyn()], weights="auto").policy.weights == "uniform"
