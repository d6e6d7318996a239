"""What is learned: the loss of the logits, and the Dice of masks. `metrics.accuracy.per_sample` scores with it.

Pure and free of host synchronisation, so that the loss can run inside a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import unknown
from ..kernels import loss

DICE_EPS = 1e-5
NAMES = ("classification", "segmentation")


@dataclass(frozen=True)
class Task:
    """Classification: logits (B, C), targets (B,). Segmentation: logits (B, C, H, W), targets (B, H, W).

    Targets are whole numbers, or probabilities in the shape of the logits.
    """

    name: str

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy; for segmentation (cross-entropy + Dice) / 2."""
        if self.name == "classification":
            return cross_entropy(logits, target)
        # Written out: PyTorch's cross-entropy of maps adds in no fixed order on a GPU.
        t = as_probabilities(target, logits.shape[1], logits.dtype)
        entropy = -(t * logits.log_softmax(1)).sum(1).mean()
        return (entropy + soft_dice_loss(logits, t)) / 2


def task_named(name: str) -> Task:
    if name not in NAMES:
        raise unknown("task", name, NAMES)
    return Task(name)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """F.cross_entropy(logits, target), in one kernel forward and one backward where there are such."""
    if loss.usable(logits, target):
        return loss.CrossEntropy.apply(logits, target)
    return F.cross_entropy(logits, target)


def as_probabilities(target: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Labels (B, …) as (B, C, …) of zeros and ones; F.one_hot reads values on the host, a comparison does not."""
    if target.is_floating_point():
        return target
    numbers = torch.arange(classes, device=target.device).view(1, classes, *[1] * (target.dim() - 1))
    return (target.unsqueeze(1) == numbers).to(dtype)


def soft_dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    """1 − mean over the classes, background included, of (2 Σ p t + ε) / (Σ p + Σ t + ε); sums over the whole batch."""
    p = logits.softmax(1)
    t = as_probabilities(target, logits.shape[1], p.dtype)
    over = (0, *range(2, p.dim()))
    overlap = (2 * (p * t).sum(over) + DICE_EPS) / (p.sum(over) + t.sum(over) + DICE_EPS)
    return 1 - overlap.mean()


def image_dice(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """2·|∩| / (|predicted| + |truth| + ε) per image and class: (B, C). A class absent from both scores 0."""
    p, t = as_probabilities(predicted, classes), as_probabilities(truth, classes)
    over = tuple(range(2, p.dim()))
    return 2 * (p * t).sum(over) / (p.sum(over) + t.sum(over) + DICE_EPS)
