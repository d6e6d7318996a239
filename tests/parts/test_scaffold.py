"""SCAFFOLD's variates under partial participation, against a loop over numbers."""

from __future__ import annotations

import pytest
import torch
from quadratic import W, path, scalars, walk, weight

from consilience.errors import ConfigError
from consilience.parts.ditto import Ditto
from consilience.parts.rep import Rep
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, in_model, run_tiny, tiny_federation

TARGETS, SIZES, COHORTS = [1.0, -2.0, 4.0], [1, 2, 3], ([0, 1], [1, 2], [0], [0, 1, 2])


def test_one_round_by_hand():
    # a = (1, 3), one step each, η = 0.1, no momentum: w_i = 0.1·a_i. c_i = (0 − w_i)/(1·0.1) = −a_i, the gradient at 0.
    # N = 4 but |S| = 2: c = (1/4)·(−1 − 3) = −1, not −2.
    fed = scalars([Scaffold()], [1.0, 3.0, 5.0, 7.0], [1, 1, 1, 1])
    fed.round([0, 1])
    assert weight(fed) == pytest.approx(0.2, abs=1e-6)
    assert fed.shared["scaffold"]["c"][W].item() == pytest.approx(-1.0, abs=1e-6)
    assert [fed.client(i).tensors["kept"]["scaffold"]["c"][W].item() for i in range(4)] == pytest.approx([-1, -3, 0, 0], abs=1e-5)
    # next, client 2 alone, c₂ = 0: g = (0.2 − 5) − 0 + (−1) = −5.8 → w = 0.78; c₂ = 0 + 1 + (0.2 − 0.78)/0.1 = −4.8
    fed.round([2])
    assert weight(fed) == pytest.approx(0.78, abs=1e-6)
    assert fed.client(2).tensors["kept"]["scaffold"]["c"][W].item() == pytest.approx(-4.8, abs=1e-5)
    assert fed.shared["scaffold"]["c"][W].item() == pytest.approx(-1.0 - 4.8 / 4, abs=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("divisor", ["path", "steps"])
def test_variates_with_partial_participation(momentum, divisor):
    fed = scalars([Scaffold(divisor=divisor)], TARGETS, SIZES, lr=0.02, momentum=momentum)
    w, c, own = 0.0, 0.0, [0.0, 0.0, 0.0]
    for cohort in COHORTS:
        ends, new = [], {}
        for i in cohort:
            end = walk(w, TARGETS[i], SIZES[i], 0.02, momentum, lambda g, _, shift=c - own[i]: g + shift)
            length = path(SIZES[i], 0.02, momentum if divisor == "path" else 0.0)
            new[i] = own[i] - c + (w - end) / length
            ends.append(end)
        c += sum(new[i] - own[i] for i in cohort) / 3          # 1/N, not 1/|S|
        w = sum(ends) / len(ends)
        for i in cohort:                                        # those absent keep theirs
            own[i] = new[i]
        fed.round(cohort)
        assert weight(fed) == pytest.approx(w, abs=1e-5)
        assert fed.shared["scaffold"]["c"][W].item() == pytest.approx(c, rel=1e-4, abs=1e-4)
        for i in range(3):
            assert fed.client(i).tensors["kept"]["scaffold"]["c"][W].item() == pytest.approx(own[i], rel=1e-4, abs=1e-4)


def test_the_published_divisor_overshoots_under_momentum():
    # ρ = 0.9, K = 3: the model walks 5.61 steps' worth, so dividing by 3 makes the variate 1.87 times too large.
    ends = [scalars([Scaffold(divisor=d)], [1.0], [3], lr=1e-4, momentum=0.9) for d in ("path", "steps")]
    for fed in ends:
        fed.round()
    near, far = (f.shared["scaffold"]["c"][W].item() for f in ends)
    assert near == pytest.approx(-1.0, abs=1e-3)                # the gradient at w ≈ 0
    assert far == pytest.approx(-5.61 / 3, abs=1e-3)


def test_server_step():
    # mean change 0.2, η_g = 0.5
    fed = scalars([Scaffold(server_lr=0.5)], [1.0, 3.0], [1, 1])
    fed.round()
    assert weight(fed) == pytest.approx(0.1, abs=1e-6)


def test_weights_are_uniform_unless_the_run_says_otherwise():
    assert tiny_federation([Scaffold()], weights="auto").policy.weights == "uniform"
    assert tiny_federation([Scaffold()], weights="samples").policy.weights == "samples"


def test_first_round_is_fedavg():
    assert not differences(run_tiny(rounds=1), run_tiny([Scaffold()], rounds=1), only=in_model)


def test_only_what_travels_and_trains_has_a_variate():
    fed = run_tiny([Rep(head_epochs=3), Scaffold()])
    assert set(fed.shared["scaffold"]["c"]) == {k for k in fed.model["params"] if not k.startswith("head.")}
    assert all(t.abs().sum() > 0 for t in fed.shared["scaffold"]["c"].values())


@pytest.mark.parametrize("divisor", ["path", "steps"])
def test_a_second_models_steps_do_not_lengthen_the_path(divisor):
    alone, beside = (run_tiny([Scaffold(divisor=divisor), *more], rounds=1) for more in ([], [Ditto()]))
    for k, c in alone.shared["scaffold"]["c"].items():
        torch.testing.assert_close(beside.shared["scaffold"]["c"][k], c, msg=k)


def test_refuses_paths_it_cannot_measure():
    with pytest.raises(ConfigError, match=r"scaffold .*Adam"):
        tiny_federation([Scaffold()], optimiser="adam", momentum=0.0)
    with pytest.raises(ConfigError, match=r"scaffold .*optimiser_state=reset"):
        tiny_federation([Scaffold()], optimiser_state="kept")
