"""Losses and scores, against numbers derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from consilience import rng
from consilience.core.task import as_probabilities, image_dice, soft_dice_loss, task_named
from consilience.errors import ConfigError
from consilience.metrics.accuracy import per_sample

CLASSIFICATION, SEGMENTATION = task_named("classification"), task_named("segmentation")


def test_classification_with_whole_and_soft_targets():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])         # probabilities (1/4, 3/4) and (3/4, 1/4)
    y = torch.tensor([1, 1])
    # −log(3/4) and −log(1/4)
    assert CLASSIFICATION.loss(logits, y).item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    soft = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    assert CLASSIFICATION.loss(logits, soft).item() == pytest.approx(((math.log(4) + math.log(4 / 3)) / 2 + math.log(4)) / 2)
    scores = per_sample(CLASSIFICATION, logits, y)
    assert {k: v.tolist() for k, v in scores.items()} == {"accuracy": [1, 0], "loss": pytest.approx([math.log(4 / 3), math.log(4)])}


def test_segmentation_loss_sums_over_the_whole_batch():
    # Two images of two pixels; every pixel has p = (1/4, 3/4). Truth: [0 0] and [0 1].
    logits = torch.tensor([0.0, math.log(3)]).view(1, 2, 1, 1).expand(2, 2, 1, 2)
    y = torch.tensor([[[0, 0]], [[0, 1]]])
    # class 0: 2·(3·1/4) / (4·1/4 + 3) = 1.5/4; class 1: 2·(3/4) / (4·3/4 + 1) = 1.5/4. Mean per image would give 1/3.
    dice = 1 - 1.5 / 4
    cross_entropy = (3 * math.log(4) + math.log(4 / 3)) / 4
    assert soft_dice_loss(logits, y).item() == pytest.approx(dice, abs=1e-5)
    assert SEGMENTATION.loss(logits, y).item() == pytest.approx((cross_entropy + dice) / 2, abs=1e-5)
    assert SEGMENTATION.loss(logits, as_probabilities(y, 2)).item() == pytest.approx((cross_entropy + dice) / 2, abs=1e-5)


def test_the_smoothing_makes_an_empty_class_perfect_in_the_loss():
    logits = torch.tensor([50.0, 0.0, 0.0]).view(1, 3, 1, 1)                # sure of class 0, which is true
    # classes 1 and 2: (0 + ε) / (≈0 + 0 + ε) = 1, so the loss is 0
    assert soft_dice_loss(logits, torch.zeros(1, 1, 1, dtype=torch.int64)).item() == pytest.approx(0, abs=1e-6)


def test_written_out_cross_entropy_of_maps_is_pytorchs():
    logits, y = rng.normal(rng.key(0, "l"), (2, 3, 4, 5)), rng.integers(rng.key(0, "y"), 3, (2, 4, 5))
    expected = (F.cross_entropy(logits, y) + soft_dice_loss(logits, y)) / 2
    assert SEGMENTATION.loss(logits, y).item() == pytest.approx(expected.item(), abs=1e-6)


def test_segmentation_scores():
    # image 1: predicted [1 1 0 0], truth [1 0 0 0]; image 2: predicted = truth = [1 1 1 0]
    predicted = torch.tensor([[[1, 1], [0, 0]], [[1, 1], [1, 0]]])
    y = torch.tensor([[[1, 0], [0, 0]], [[1, 1], [1, 0]]])
    # background: 2·2/(2+3) = 4/5 and 1; foreground: 2·1/(2+1) = 2/3 and 1 (less 1e-5 in the denominators)
    per_image = image_dice(predicted, y, 2)
    assert torch.allclose(per_image, torch.tensor([[4 / 5, 2 / 3], [1, 1]]), atol=1e-4)
    scores = per_sample(SEGMENTATION, as_probabilities(predicted, 2) * 10, y)
    assert scores["dice"].tolist() == pytest.approx([(4 / 5 + 2 / 3) / 2, 1], abs=1e-4)
    assert scores["dice_foreground"].tolist() == pytest.approx([2 / 3, 1], abs=1e-4)
    assert scores["accuracy"].tolist() == pytest.approx([3 / 4, 1])
    # a pixel that is right costs ln(1 + e^−10), one that is wrong 10 more: image 1 has one of four
    sure = math.log1p(math.exp(-10))
    assert scores["loss"].tolist() == pytest.approx([sure + 10 / 4, sure], abs=1e-5)


def test_a_class_absent_from_prediction_and_truth_has_no_dice():
    empty = torch.zeros(1, 2, 2, dtype=torch.int64)
    assert image_dice(empty, empty, 2).tolist() == [pytest.approx([1, 0], abs=1e-5)]


@pytest.mark.parametrize("task", [CLASSIFICATION, SEGMENTATION])
def test_a_sample_scores_the_same_in_any_batch(task):
    shape = (6, 3) if task is CLASSIFICATION else (6, 3, 4, 4)
    logits = rng.normal(rng.key(1, "l"), shape)
    y = rng.integers(rng.key(1, "y"), 3, (6, *shape[2:]))
    whole, a, b = per_sample(task, logits, y), per_sample(task, logits[:2], y[:2]), per_sample(task, logits[2:], y[2:])
    for name in whole:
        torch.testing.assert_close(torch.cat([a[name], b[name]]), whole[name])


@pytest.mark.parametrize("task", [CLASSIFICATION, SEGMENTATION])
def test_nothing_is_read_on_the_host(task):
    """On the meta device tensors have no values, so reading one fails."""
    maps = () if task is CLASSIFICATION else (4, 4)
    logits = torch.empty(2, 3, *maps, device="meta", requires_grad=True)
    y = torch.empty(2, *maps, dtype=torch.int64, device="meta")
    task.loss(logits, y).backward()
    per_sample(task, logits, y)
    task.loss(logits, torch.empty(2, 3, *maps, device="meta"))


def test_unknown_tasks():
    with pytest.raises(ConfigError, match="'segmentation'"):
        task_named("segmentaton")
