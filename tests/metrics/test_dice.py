"""Dice with and without background."""

from __future__ import annotations

import pytest
import torch

from consilience.core.task import as_probabilities, task_named
from consilience.metrics.dice import dice, dice_by_class, from_sums

PREDICTED = torch.tensor([[[1, 1], [0, 0]], [[1, 1], [1, 0]]])
TRUTH = torch.tensor([[[1, 0], [0, 0]], [[1, 1], [1, 0]]])


def test_by_class_with_and_without_background():
    # background (4/5 + 1)/2 = 9/10; foreground (2/3 + 1)/2 = 5/6
    assert dice_by_class(PREDICTED, TRUTH, 2).tolist() == pytest.approx([9 / 10, 5 / 6], abs=1e-4)
    assert dice(PREDICTED, TRUTH, 2, background=True).item() == pytest.approx((9 / 10 + 5 / 6) / 2, abs=1e-4)
    assert dice(PREDICTED, TRUTH, 2, background=False).item() == pytest.approx(5 / 6, abs=1e-4)


def test_sums_of_batches_give_the_same_numbers():
    task = task_named("segmentation")
    parts = [task.score(as_probabilities(p[None], 2) * 9, t[None]) for p, t in zip(PREDICTED, TRUTH)]
    got = from_sums({k: parts[0][k] + parts[1][k] for k in parts[0]})
    assert got["dice"] == pytest.approx(dice(PREDICTED, TRUTH, 2, background=True).item(), abs=1e-6)
    assert got["dice_foreground"] == pytest.approx(dice(PREDICTED, TRUTH, 2, background=False).item(), abs=1e-6)


def test_a_class_absent_from_both_scores_nothing():
    empty = torch.zeros(1, 2, 2, dtype=torch.int64)
    assert dice_by_class(empty, empty, 2).tolist() == pytest.approx([1, 0], abs=1e-5)
