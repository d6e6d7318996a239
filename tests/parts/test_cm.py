"""FedCM: a plain first round, then the mixture with the last direction."""

from __future__ import annotations

import pytest
from quadratic import W, path, scalars, walk, weight

from consilience.errors import ConfigError
from consilience.parts.cm import Cm
from consilience.testing import differences, in_model, run_tiny, tiny_federation


def test_by_hand():
    # a = (1, 3), K = (1, 2), η = 0.1, α = 0.25.
    # round 1, plain: w₁ = 0.1; w₂ = 0.3, then 0.3 + 0.27 = 0.57; mean 0.335.
    # Δ = mean(−0.1/0.1, −0.57/0.2) = −½(1 + 2.85) = −1.925, with each client's own K.
    # round 2, client 1 alone: g = 0.25·(0.335 − 1) + 0.75·(−1.925) = −1.61; w = 0.496; Δ = −1.61
    fed = scalars([Cm(alpha=0.25)], [1.0, 3.0], [1, 2])
    fed.round()
    assert weight(fed) == pytest.approx(0.335, abs=1e-6)
    assert fed.shared["cm"]["direction"][W].item() == pytest.approx(-1.925, abs=1e-5)
    fed.round([0])
    assert weight(fed) == pytest.approx(0.335 + 0.161, abs=1e-6)
    assert fed.shared["cm"]["direction"][W].item() == pytest.approx(-1.61, abs=1e-5)


def test_with_momentum_the_direction_is_per_length_of_the_path():
    targets, sizes = [1.0, -2.0], [2, 3]
    fed = scalars([Cm(alpha=0.5)], targets, sizes, lr=0.05, momentum=0.9)
    w, direction = 0.0, None
    for _ in range(3):
        mix = (lambda g, _: g) if direction is None else (lambda g, _, d=direction: 0.5 * g + 0.5 * d)
        ends = [walk(w, a, k, 0.05, 0.9, mix) for a, k in zip(targets, sizes)]
        direction = sum((w - end) / path(k, 0.05, 0.9) for end, k in zip(ends, sizes)) / 2
        w = sum(ends) / 2
        fed.round()
        assert weight(fed) == pytest.approx(w, abs=1e-5)
        assert fed.shared["cm"]["direction"][W].item() == pytest.approx(direction, abs=1e-4)


def test_first_round_is_fedavg():
    # steps in round one are plain, not scaled by α
    assert not differences(run_tiny(rounds=1), run_tiny([Cm(alpha=0.1)], rounds=1), only=in_model)


def test_refuses_paths_it_cannot_measure():
    with pytest.raises(ConfigError, match=r"cm .*Adam"):
        tiny_federation([Cm()], optimiser="adam", momentum=0.0)
