"""CIFAR-100, in the official binary version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...options import option
from ..dataset import Dataset
from ._files import check_labels, read_lines, read_records
from .base import Download, Source, Wanted

_RECORD = 2 + 3 * 32 * 32       # coarse label, fine label, then red, green and blue planes


@dataclass(frozen=True)
class Cifar100(Source):
    """50,000 + 10,000 colour images of 32×32 in 100 classes (20 coarse ones), from cifar-100-binary.

    Samples carry the group "coarse", the superclass of their class.
    """

    labels: str = option("fine", "which labels to learn: 100 fine or 20 coarse classes", choices=("fine", "coarse"))

    name = "cifar100"
    title = "50,000 + 10,000 colour images, 32×32, 100 classes"
    folders = ("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100", "cifar-100")
    files = (Wanted("train.bin", 50000 * _RECORD, ("6172c7755cfe09b2fe270c85cebc1b15",)),
             Wanted("test.bin", 10000 * _RECORD, ("4499cfba6c016c1be1438163640a0898",)),
             Wanted("fine_label_names.txt", None, ("b517b835c830bc54413daa4cf904aad9",), optional=True),
             Wanted("coarse_label_names.txt", None, ("50d7751bb0bc2085059b59e23eb6f789",), optional=True))
    downloads = (Download("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "", "03b5dce01913d631647c71ecec9e9cb8"),)
    how_to_get = "unpack cifar-100-binary.tar.gz (the binary version, not the python one) in the data directory."

    def read_folder(self, folder: Path) -> Dataset:
        images, fine, coarse = [], [], []
        for name in ("train.bin", "test.bin"):
            rows = torch.from_numpy(read_records(folder / name, _RECORD, "CIFAR-100 records"))
            coarse.append(check_labels(rows[:, 0], 20, folder / name))
            fine.append(check_labels(rows[:, 1], 100, folder / name))
            images.append(rows[:, 2:])
        group = torch.cat(coarse)
        names = {kind: tuple(read_lines(folder / f"{kind}_label_names.txt"))
                 if (folder / f"{kind}_label_names.txt").is_file() else () for kind in ("fine", "coarse")}
        return Dataset(name=self.name, x=torch.cat(images).reshape(-1, 3, 32, 32),
                       y=torch.cat(fine) if self.labels == "fine" else group,
                       classes=100 if self.labels == "fine" else 20, class_names=names[self.labels],
                       official_test=torch.arange(len(fine[0]), len(group)),
                       groups={"coarse": group}, group_names={"coarse": names["coarse"]},
                       mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
