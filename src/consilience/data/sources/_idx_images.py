"""MNIST and its relatives: four idx files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...errors import DataError
from ._files import check_labels, check_lengths, read_idx

NAMES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def read_pair(images: Path, labels: Path, classes: int) -> tuple[Tensor, Tensor]:
    x, y = read_idx(images, 3), check_labels(read_idx(labels, 1), classes, labels)
    check_lengths(x, y, images, labels)
    if tuple(x.shape[1:]) != (28, 28):
        raise DataError(f"The file {images} must hold images of 28 × 28. Got {x.shape[1]} × {x.shape[2]} instead.")
    return x[:, None], y


def read_four(files: list[Path], classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the rows of the test set, training samples first."""
    (x, y), (x_test, y_test) = read_pair(files[0], files[1], classes), read_pair(files[2], files[3], classes)
    return torch.cat([x, x_test]), torch.cat([y, y_test]), torch.arange(len(y), len(y) + len(y_test))
