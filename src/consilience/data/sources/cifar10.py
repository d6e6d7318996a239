"""CIFAR-10, in the official binary version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..dataset import Dataset
from ._files import check_labels, read_lines, read_records
from .base import Download, Source, Wanted

_MD5 = ("5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692", "942cd6a4bcdd0dd3c604fbe906cb4421",
        "ae636b3ba5c66a11e91e8cb52e771fcb", "53f37980c15c3d472c316c40844f3f0d", "803d5f7f4d78ea53de84dbe85f74fb6d")
_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_RECORD = 1 + 3 * 32 * 32       # a label, then red, green and blue planes


@dataclass(frozen=True)
class Cifar10(Source):
    """50,000 + 10,000 colour images of 32×32 in ten classes, from cifar-10-batches-bin (the python version is a pickle)."""

    name = "cifar10"
    title = "50,000 + 10,000 colour images, 32×32, 10 classes"
    folders = ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "cifar-10")
    files = (*(Wanted(n, 10000 * _RECORD, (m,)) for n, m in zip(_BATCHES, _MD5)), Wanted("batches.meta.txt", optional=True))
    downloads = (Download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "", "c32a1d4ab5d03f1284b67883e8d87530"),)
    how_to_get = "unpack cifar-10-binary.tar.gz (the binary version, not the python one) in the data directory."

    def read_folder(self, folder: Path) -> Dataset:
        parts, labels = [], []
        for name in _BATCHES:
            rows = torch.from_numpy(read_records(folder / name, _RECORD, "CIFAR-10 records"))
            labels.append(check_labels(rows[:, 0], 10, folder / name))
            parts.append(rows[:, 1:])
        x = torch.cat(parts).reshape(-1, 3, 32, 32)
        y = torch.cat(labels)
        names = read_lines(folder / "batches.meta.txt") if (folder / "batches.meta.txt").is_file() else []
        return Dataset(name=self.name, x=x, y=y, classes=10, class_names=tuple(names) if len(names) == 10 else _CLASSES,
                       official_test=torch.arange(len(y) - len(labels[-1]), len(y)),
                       mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
