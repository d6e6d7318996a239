"""The Dice coefficient of a segmentation, as FedFA reports it (with background) and for the foreground alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.task import image_dice


def dice_by_class(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Mean over the images of each class's Dice: (C,). Class 0 is the background."""
    return image_dice(predicted, truth, classes).mean(0)


def dice(predicted: Tensor, truth: Tensor, classes: int, *, background: bool) -> Tensor:
    """Mean over images, then over classes. With background it is FedFA's number, which is higher."""
    return dice_by_class(predicted, truth, classes)[0 if background else 1:].mean()


def from_sums(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The two numbers from added `Task.score` sums of a segmentation."""
    count = max(float(torch.as_tensor(sums["count"])), 1.0)
    return {"dice": float(sums["dice_sum"]) / count, "dice_foreground": float(sums["dice_foreground_sum"]) / count}
