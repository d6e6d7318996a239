"""What scores of clients and of rounds say together."""

from __future__ import annotations

import pytest

from consilience.metrics.accuracy import Scores
from consilience.metrics.clients import bottom_decile, client_mean, harmed, worst
from consilience.metrics.curves import mean_of_best, rounds_to, speed_up

SCORES = {"a": 0.9, "b": 0.5, "c": 0.7}


def test_means_and_the_worst():
    assert client_mean(SCORES) == pytest.approx(0.7)
    assert worst(SCORES) == ("b", 0.5)
    assert worst({"y": 0.1, "x": 0.1}) == ("x", 0.1)
    assert worst({}) is None
    assert client_mean({}) is None


def test_bottom_decile_counts_a_tenth_rounded_up():
    scores = {str(i): i / 100 for i in range(21)}                   # ⌈21/10⌉ = 3 lowest: 0, .01, .02
    assert bottom_decile(scores) == pytest.approx(0.01)
    assert bottom_decile(SCORES) == 0.5                             # one of three
    assert bottom_decile({}) is None


def test_harmed_against_training_alone():
    got = harmed(SCORES, {"a": 0.8, "b": 0.6, "c": 0.71, "only there": 1.0})
    assert (got["clients"], got["harmed"]) == (3, 2)
    assert got["share"] == pytest.approx(2 / 3)
    assert got["mean_gain"] == pytest.approx((0.1 - 0.1 - 0.01) / 3)
    assert got["mean_loss_of_harmed"] == pytest.approx(0.055)
    assert got["worst_hit"] == "b"
    assert harmed(SCORES, {"a": 0.8, "b": 0.6, "c": 0.71}, margin=0.05)["harmed"] == 1
    assert harmed(SCORES, SCORES)["harmed"] == 0                    # equal is not harmed


def test_a_loss_of_just_the_margin_is_no_harm():
    """10 of 20 right against 11 of 20 are one sample, 0.05; their floats differ by 4e-17 more."""
    assert 0.5 - 0.55 < -0.05
    assert harmed({"a": 10 / 20}, {"a": 11 / 20}, margin=0.05)["harmed"] == 0
    assert harmed({"a": 9 / 20}, {"a": 11 / 20}, margin=0.05)["harmed"] == 1


CURVE = [(2, 0.40), (4, 0.55), (6, 0.50), (8, 0.61)]


def test_rounds_to_a_threshold():
    assert rounds_to(CURVE, 0.55) == 4
    assert rounds_to(CURVE, 0.56) == 8
    assert rounds_to(CURVE, 0.62) is None
    assert speed_up(886, 530) == pytest.approx(1.67, abs=5e-3)      # FedBR, Table 2
    assert speed_up(None, 4) is None
    assert speed_up(4, None) is None


def test_a_threshold_met_exactly_is_reached():
    """0 of 3 and 13 of 23 right are 13 of 26, a half; 13/23 is no binary fraction, and 23 times its float is below 13."""
    half = Scores(("a", "b"), (3, 23), {"accuracy": (0 / 3, 13 / 23)}).pooled("accuracy")
    assert half < 0.5
    assert rounds_to([(1, 0.25), (2, half)], 0.5) == 2
    assert rounds_to([(1, 1 - 1e-7)], 1.0) is None                  # one wrong of ten million


def test_mean_of_best_is_over_any_rounds():
    assert mean_of_best(CURVE, 2) == pytest.approx((0.61 + 0.55) / 2)
    assert mean_of_best(CURVE) == pytest.approx(2.06 / 4)           # fewer than five
    assert mean_of_best([]) is None
