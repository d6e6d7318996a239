"""FedNova: unequal steps, with and without momentum, by hand."""

from __future__ import annotations

import pytest
import torch
from quadratic import path, scalars, walk, weight

from consilience.errors import ConfigError
from consilience.parts.nova import Nova
from consilience.testing import run_tiny, tiny_federation


def test_unequal_steps_by_hand():
    # a = (1, −1), K = (1, 2), η = 0.1, w = 0, weights ½.
    # w₁ = 0.1 (Δ = 0.1, per step 0.1). w₂: −0.1, then −0.1 − 0.1·0.9 = −0.19 (per step −0.095).
    # τ_eff = ½·1 + ½·2 = 1.5; change = 1.5·(½·0.1 − ½·0.095) = 0.00375. FedAvg: ½·(0.1 − 0.19) = −0.045.
    fed = scalars([Nova()], [1.0, -1.0], [1, 2])
    fed.round()
    assert weight(fed) == pytest.approx(0.00375, abs=1e-7)
    plain = scalars([], [1.0, -1.0], [1, 2])
    plain.round()
    assert weight(plain) == pytest.approx(-0.045, abs=1e-7)


def test_sample_weights_by_hand():
    # the same with p = (1/3, 2/3): τ_eff = 1/3 + 4/3 = 5/3; change = 5/3·(1/3·0.1 − 2/3·0.095) = −0.05
    fed = scalars([Nova()], [1.0, -1.0], [1, 2], weights="samples")
    fed.round()
    assert weight(fed) == pytest.approx(5 / 3 * (0.1 / 3 - 2 * 0.095 / 3), abs=1e-7)


def test_momentum_counts_in_the_length():
    # ρ = 0.9: a_i is the sum of the momentum buffers under a unit gradient: K = 1: 1; K = 3: 1 + 1.9 + 2.71 = 5.61
    assert path(3, 1.0, 0.9) == pytest.approx(5.61)
    fed = scalars([Nova()], [1.0, -2.0], [1, 3], momentum=0.9)
    w1, w2 = walk(0.0, 1.0, 1, 0.1, 0.9), walk(0.0, -2.0, 3, 0.1, 0.9)
    fed.round()
    assert weight(fed) == pytest.approx((1 + 5.61) / 2 * (0.5 * w1 / 1 + 0.5 * w2 / 5.61), abs=1e-6)


def test_the_schedule_does_not_change_the_lengths():
    # lengths are in steps, so that a smaller rate in round two leaves the weights as they were
    fed = scalars([Nova()], [1.0, -1.0], [1, 2], schedule="exponential(gamma=0.5)")
    fed.round()
    w = weight(fed)
    fed.round()
    w1, w2 = walk(w, 1.0, 1, 0.05), walk(w, -1.0, 2, 0.05)
    assert weight(fed) == pytest.approx(w + 1.5 * (0.5 * (w1 - w) + 0.5 * (w2 - w) / 2), abs=1e-7)


def test_equal_steps_give_fedavg():
    a, b = run_tiny([Nova()], sizes=(16, 16, 16)), run_tiny(sizes=(16, 16, 16))
    for k, w in b.model["params"].items():
        torch.testing.assert_close(a.model["params"][k], w, atol=1e-6, rtol=1e-5)


def test_statistics_keep_the_runs_weights():
    # buffers are averaged plainly (METHODS.md 7.6): one round from the same model leaves FedAvg's buffers bit for bit
    a, b = run_tiny([Nova()], rounds=1), run_tiny(rounds=1)
    for k, w in b.model["buffers"].items():
        assert torch.equal(a.model["buffers"][k], w)
    assert not torch.equal(a.model["params"]["head.weight"], b.model["params"]["head.weight"])


def test_refuses_paths_it_cannot_measure():
    with pytest.raises(ConfigError, match=r"nova .*Adam"):
        tiny_federation([Nova()], optimiser="adam", momentum=0.0)
    with pytest.raises(ConfigError, match=r"nova .*kept across rounds"):
        tiny_federation([Nova()], optimiser_state="kept")
    tiny_federation([Nova()], optimiser_state="kept", momentum=0.0)
