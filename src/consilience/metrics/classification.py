"""Scores of class probabilities: balanced accuracy, areas under curves, one class against the rest, calibration."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def class_accuracy(predicted: Tensor, y: Tensor, classes: int) -> list[float | None]:
    """Share of each class's samples that are right; None for a class without samples."""
    right, of = [], []
    for c in range(classes):
        mine = y == c
        of.append(int(mine.sum()))
        right.append(int((predicted[mine] == c).sum()))
    return [r / n if n else None for r, n in zip(right, of)]


def balanced_accuracy(predicted: Tensor, y: Tensor) -> float | None:
    """Mean over the classes present of the share of their samples that are right (macro recall)."""
    if not len(y):
        return None
    from sklearn.metrics import recall_score
    present = y.unique().numpy()
    return float(recall_score(y.numpy(), predicted.numpy(), labels=present, average="macro", zero_division=0))


def auroc(scores: Tensor, y: Tensor) -> float | None:
    """Area under the ROC curve, each class against the rest, mean over the classes that have samples on both sides. Scores are
    probabilities, or anything in their order: odds have no ties where a model is very sure."""
    from sklearn.metrics import roc_auc_score
    s, labels = scores.double().numpy(), y.numpy()
    areas = [roc_auc_score(labels == c, s[:, c]) for c in np.unique(labels) if (labels != c).any()]
    return float(np.mean(areas)) if areas else None


def sensitivity(predicted: Tensor, y: Tensor, positive: int) -> float | None:
    """Share of the samples of a class that are found (recall). None without such samples."""
    mine = y == positive
    return float((predicted[mine] == positive).double().mean()) if mine.any() else None


def specificity(predicted: Tensor, y: Tensor, positive: int) -> float | None:
    """Share of the other classes' samples that are not taken for the class. None without such samples."""
    others = y != positive
    return float((predicted[others] != positive).double().mean()) if others.any() else None


def precision(predicted: Tensor, y: Tensor, positive: int) -> float | None:
    """Share of what is taken for the class that belongs to it; 0 where nothing is. None without samples of the class."""
    if not (y == positive).any():
        return None
    taken = predicted == positive
    return float((y[taken] == positive).double().mean()) if taken.any() else 0.0


def f1(predicted: Tensor, y: Tensor, positive: int) -> float | None:
    """2 TP / (2 TP + FP + FN): the harmonic mean of precision and sensitivity. None without samples of the class."""
    mine, taken = y == positive, predicted == positive
    return 2 * int((mine & taken).sum()) / int(mine.sum() + taken.sum()) if mine.any() else None


def average_precision(scores: Tensor, y: Tensor, positive: int) -> float | None:
    """Area under the steps of precision over sensitivity, by the class's probability, or odds. None without samples on both sides."""
    mine = y == positive
    if not mine.any() or mine.all():
        return None
    from sklearn.metrics import average_precision_score
    return float(average_precision_score(mine.numpy(), scores[:, positive].double().numpy()))


def calibration(probabilities: Tensor, y: Tensor, bins: int = 15) -> dict[str, float | None]:
    """Expected calibration error, its largest term, and mean confidence.

    Samples fall by their highest probability into `bins` intervals (b/B, (b+1)/B] of equal width;
    ECE = Σ_b |B_b|/n · |accuracy(B_b) − confidence(B_b)|, MCE = the largest |accuracy − confidence| of a bin that is not empty.
    """
    if not len(y):
        return {"ece": None, "mce": None, "confidence": None}
    confidence, predicted = (t.numpy() for t in probabilities.double().max(1))
    right = (predicted == y.numpy()).astype(float)
    where = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(where, minlength=bins)
    filled = count > 0
    gap = np.abs(np.bincount(where, right, bins) - np.bincount(where, confidence, bins))[filled]
    return {"ece": float(gap.sum() / len(right)), "mce": float((gap / count[filled]).max()), "confidence": float(confidence.mean())}
