"""scikit-learn's digits: small enough to be always there."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ..dataset import Dataset
from .base import Source


def _read() -> tuple[np.ndarray, np.ndarray]:
    """What `load_digits(return_X_y=True)` gives, from the same file: to import scikit-learn for it takes every process half a second."""
    found = find_spec("sklearn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if path is None or not path.is_file():                     # kept elsewhere by another version: it knows where
        from sklearn.datasets import load_digits
        return load_digits(return_X_y=True)
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


@dataclass(frozen=True)
class Digits(Source):
    """1,797 handwritten digits of 8×8 pixels, from the scikit-learn package. There is no published test set.

    The package holds grey levels 0 to 16; they are scaled to 0 to 255.
    """

    name = "digits"
    title = "1,797 handwritten digits, 8×8, in scikit-learn"
    how_to_get = "it comes with scikit-learn."

    def read(self, directory: str | Path | None = None) -> Dataset:
        images, labels = _read()
        x = torch.from_numpy(images).mul(255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        return Dataset(name=self.name, x=x, y=torch.from_numpy(labels).long(), classes=10,
                       class_names=tuple("0123456789"), mean=(0.305,), std=(0.376,))
