"""scikit-learn's digits: small enough to be always there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..dataset import Dataset
from .base import Source


@dataclass(frozen=True)
class Digits(Source):
    """1,797 handwritten digits of 8×8 pixels, from the scikit-learn package. There is no published test set.

    The package holds grey levels 0 to 16; they are scaled to 0 to 255.
    """

    name = "digits"
    title = "1,797 handwritten digits, 8×8, in scikit-learn"
    how_to_get = "it comes with scikit-learn."

    def read(self, directory: str | Path | None = None) -> Dataset:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(images).mul(255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        return Dataset(name=self.name, x=x, y=torch.from_numpy(labels).long(), classes=10,
                       class_names=tuple("0123456789"), mean=(0.305,), std=(0.376,))
