"""Balanced accuracy, AUROC and calibration against scikit-learn and against hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, precision_score, recall_score, roc_auc_score

from consilience import rng
from consilience.metrics.classification import (
    auroc,
    average_precision,
    balanced_accuracy,
    calibration,
    class_accuracy,
    f1,
    precision,
    sensitivity,
    specificity,
)
from consilience.metrics.gather import Answers
from consilience.metrics.measures.scores import Auroc, AveragePrecision


def answered(logits: torch.Tensor, y: torch.Tensor) -> Answers:
    return Answers(logits, logits, y, torch.zeros(len(y), dtype=torch.int64))


def draw(seed: int, n: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.cat([torch.arange(classes), rng.integers(rng.key(seed, "y"), classes, (n - classes,))])
    return (rng.normal(rng.key(seed, "logits"), (n, classes)) + torch.nn.functional.one_hot(y, classes)).double().softmax(1), y


@given(st.integers(0, 1000), st.integers(2, 6))
def test_equal_to_scikit_learn(seed, classes):
    p, y = draw(seed, 40, classes)
    assert balanced_accuracy(p.argmax(1), y) == pytest.approx(balanced_accuracy_score(y, p.argmax(1)))
    expected = roc_auc_score(y, p[:, 1]) if classes == 2 else roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert auroc(p, y) == pytest.approx(expected)


def test_auroc_is_over_the_classes_present():
    # class 2 has no sample. class 0: positive .8, .3 against negative .4, .1: 3 of 4 pairs in order; class 1 likewise by p_1:
    # positive .5, .8 against negative .1, .6: .5>.1, .5<.6, .8>.1, .8>.6: 3 of 4
    p = torch.tensor([[.8, .1, .1], [.3, .6, .1], [.4, .5, .1], [.1, .8, .1]])
    assert auroc(p, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.75)
    assert auroc(p, torch.tensor([1, 1, 1, 1])) is None             # no class has samples on both sides


def test_a_sure_model_is_ranked_by_how_sure_it_is():
    """Two classes, p = 1/(1 + e^(−gap)): 1 to the last bit from a gap of 37 on. The positives' gaps, 60 and 70, are above all others, so
    every pair is in order and both areas are 1. By p the positives would tie with two of four others: (4 + 4/2)/8 = 3/4 for class 1."""
    gap, y = torch.tensor([45.0, 60.0, 50.0, -3.0, -40.0, 70.0]), torch.tensor([0, 1, 0, 0, 0, 1])
    sure = answered(torch.stack([torch.zeros(6), gap], 1), y)
    assert sure.probabilities[[0, 1, 2, 5], 1].tolist() == [1.0] * 4
    assert Auroc().value(sure) == 1.0
    assert AveragePrecision().against(sure, 1) == 1.0
    assert torch.allclose(sure.odds, torch.stack([-gap, gap], 1).double())


@given(st.integers(0, 1000), st.integers(2, 6))
def test_odds_are_those_of_the_probabilities(seed, classes):
    logits = rng.normal(rng.key(seed, "logits"), (20, classes)) * 3
    answers = answered(logits, torch.zeros(20, dtype=torch.int64))
    p = answers.probabilities
    assert torch.allclose(answers.odds, (p / (1 - p)).log())
    turned = answered(logits[:1].repeat(classes, 1), torch.zeros(classes, dtype=torch.int64))
    shuffled = answered(torch.stack([logits[0].roll(i) for i in range(classes)]), torch.zeros(classes, dtype=torch.int64))
    assert torch.equal(torch.stack([shuffled.odds[i].roll(-i) for i in range(classes)]), turned.odds)
    ties = answered(torch.ones(5, classes) * torch.arange(5)[:, None], torch.zeros(5, dtype=torch.int64)).odds
    assert all(len(column.unique()) == 1 for column in ties.T)      # who says nothing says nothing at any level


def test_balanced_accuracy_by_hand():
    # class 0: 3 of 4 right, class 1: 0 of 1, class 2 absent though predicted once: (3/4 + 0)/2
    predicted, y = torch.tensor([0, 0, 0, 2, 0]), torch.tensor([0, 0, 0, 0, 1])
    assert balanced_accuracy(predicted, y) == pytest.approx(3 / 8)
    assert class_accuracy(predicted, y, 3) == [0.75, 0.0, None]
    assert balanced_accuracy(y[:0], y[:0]) is None


def test_calibration_by_hand():
    # two bins, (0, .5] and (.5, 1]. Confidences .5 (right), .5 (wrong) | .9 (right), .7 (wrong), .8 (right)
    # bin 1: |1/2 − .5| = 0; bin 2: |2/3 − .8| = 2/15; ECE = 3/5 · 2/15 = .08; the largest bin error 2/15
    p = torch.tensor([[.5, .25, .25], [.5, .25, .25], [.9, .05, .05], [.1, .7, .2], [.1, .1, .8]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 0, 2])
    got = calibration(p, y, bins=2)
    assert got["ece"] == pytest.approx(0.08)
    assert got["mce"] == pytest.approx(2 / 15)
    assert got["confidence"] == pytest.approx(3.4 / 5)


def test_a_sure_and_right_model_is_calibrated():
    p, y = torch.eye(4, dtype=torch.float64), torch.arange(4)
    assert calibration(p, y) == {"ece": 0.0, "mce": 0.0, "confidence": 1.0}
    assert calibration(p, y.flip(0))["ece"] == 1.0                  # sure and wrong


@given(st.integers(0, 1000), st.integers(2, 6))
def test_one_class_against_the_rest_is_scikit_learn_s(seed, classes):
    p, y = draw(seed, 40, classes)
    predicted, c = p.argmax(1), seed % classes
    for ours, theirs in ((sensitivity, recall_score), (precision, precision_score), (f1, f1_score)):
        assert ours(predicted, y, c) == pytest.approx(theirs(y == c, predicted == c, zero_division=0))
    assert specificity(predicted, y, c) == pytest.approx(recall_score(y != c, predicted != c))
    assert average_precision(p, y, c) == pytest.approx(average_precision_score(y == c, p[:, c]))


def test_one_class_against_the_rest_by_hand():
    # positive: samples 0, 1, 2, found: 0 and 1; of the 5 others 1 is taken for positive
    predicted, y = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0]), torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    assert (sensitivity(predicted, y, 1), specificity(predicted, y, 1)) == pytest.approx((2 / 3, 4 / 5))
    assert (precision(predicted, y, 1), f1(predicted, y, 1)) == pytest.approx((2 / 3, 4 / 6))
    nothing = torch.zeros_like(y)
    assert (sensitivity(nothing, y, 1), specificity(nothing, y, 1), precision(nothing, y, 1), f1(nothing, y, 1)) == (0, 1, 0, 0)
    assert (sensitivity(predicted, nothing, 1), precision(predicted, nothing, 1), f1(predicted, nothing, 1)) == (None, None, None)
    assert specificity(predicted, torch.ones_like(y), 1) is None
    assert average_precision(torch.rand(8, 2), nothing, 1) is None
