"""Tiny ImageNet, as the course CS231n gives it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import DataError
from ..dataset import Dataset
from ._files import read_lines
from ._images import image_files, read_images
from .base import Download, Source, Wanted


@dataclass(frozen=True)
class TinyImageNet(Source):
    """100,000 + 10,000 colour images of 64×64 in 200 classes, from tiny-imagenet-200.

    The published test images have no labels, so the validation images are the test set. DBE divides the training images only.
    """

    name = "tiny_imagenet"
    title = "100,000 + 10,000 colour images, 64×64, 200 classes"
    folders = ("tiny-imagenet-200", "tiny_imagenet", "tiny-imagenet")
    files = (Wanted("wnids.txt"), Wanted("train/"), Wanted("val/val_annotations.txt"), Wanted("words.txt", optional=True))
    downloads = (Download("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "", "90528d7ca1a48142e341f4ef8d21d0de"),)
    how_to_get = "unpack tiny-imagenet-200.zip in the data directory."

    def read_folder(self, folder: Path) -> Dataset:
        ids = sorted(read_lines(folder / "wnids.txt"))
        label = {name: i for i, name in enumerate(ids)}
        paths: list[Path] = []
        labels: list[int] = []
        for name in ids:
            at = folder / "train" / name / "images"
            files = image_files(at) if at.is_dir() else []
            if not files:
                raise DataError(f"The folder {at} must hold the training images of class {name}, but it holds none.")
            paths += files
            labels += [label[name]] * len(files)
        n_train = len(paths)
        annotations = folder / "val" / "val_annotations.txt"
        for number, line in enumerate(read_lines(annotations), 1):
            file, name = [*line.split("\t"), ""][:2]
            if name not in label:
                raise DataError(f"Line {number} of {annotations} is mislabelled: {name!r} is not in wnids.txt.")
            paths.append(folder / "val" / "images" / file)
            labels.append(label[name])
        words = dict(line.split("\t", 1) for line in read_lines(folder / "words.txt")
                     if "\t" in line) if (folder / "words.txt").is_file() else {}
        return Dataset(name=self.name, x=read_images(paths, 64), y=torch.tensor(labels), classes=len(ids),
                       class_names=tuple(words.get(i, i).split(",")[0] for i in ids),
                       official_test=torch.arange(n_train, len(paths)),
                       mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821))
