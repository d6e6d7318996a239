"""CINIC-10: CIFAR-10's classes from CIFAR-10 and ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...options import option
from ..dataset import Dataset
from ._images import class_files, read_images
from .base import Download, Source, Wanted

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Cinic10(Source):
    """90,000 + 90,000 + 90,000 colour images of 32×32 (train, valid, test), from <part>/<class>/*.png.

    FedFM counts 9,000 training images per class, so the valid part is left out unless asked for. Samples carry the group
    "origin": cifar10 or imagenet, told by the file's name.
    """

    valid: str = option("out", "what becomes of the valid part", choices=("out", "train", "published"))

    name = "cinic10"
    title = "90,000 + 90,000 colour images, 32×32, 10 classes; CIFAR-10 and ImageNet mixed"
    folders = ("cinic-10", "CINIC-10", "cinic10")
    files = tuple(Wanted(f"{p}/") for p in ("train", "valid", "test"))
    downloads = (Download("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz", "cinic-10",
                          "6ee4d0c996905fe93221de577967a372"),)
    how_to_get = "unpack CINIC-10.tar.gz in the folder 'cinic-10' of the data directory."

    def read_folder(self, folder: Path) -> Dataset:
        parts = {"train": 0, "valid": 1, "test": 2}
        if self.valid == "out":
            del parts["valid"]
        paths: list[Path] = []
        labels: list[int] = []
        roles: list[int] = []
        for part, number in parts.items():
            files, of_class = class_files(folder / part, _CLASSES)
            paths += files
            labels += of_class
            roles += [0 if part == "valid" and self.valid == "train" else number] * len(files)
        role = torch.tensor(roles)
        origin = torch.tensor([0 if p.name.startswith("cifar10") else 1 for p in paths])
        return Dataset(name=self.name, x=read_images(paths, 32), y=torch.tensor(labels), classes=10, class_names=_CLASSES,
                       official_test=(role == 2).nonzero().flatten(), roles=role, groups={"origin": origin},
                       group_names={"origin": ("cifar10", "imagenet")},
                       mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835))
