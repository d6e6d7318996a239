"""PACS: the same seven things as photos, paintings, cartoons and sketches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...options import option
from ..dataset import Dataset
from ._domains import read_domains
from .base import Source, Wanted

_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@dataclass(frozen=True)
class Pacs(Source):
    """9,991 images in four domains and seven classes, from <domain>/<class>/ folders. There is no published test set.

    FedBR resizes every image to 32×32 and normalises with ImageNet's mean and deviation.
    """

    size: int = option(32, "images are resized to this many pixels, height and width", low=8)

    name = "pacs"
    title = "9,991 images in 4 domains (art painting, cartoon, photo, sketch), 7 classes"
    folders = ("PACS", "pacs", "PACS/kfold", "pacs/kfold", "kfold")
    files = tuple(Wanted(f"{d}/", also=(f"{d.replace('_', ' ')}/",)) for d in _DOMAINS)
    how_to_get = "put the folders art_painting, cartoon, photo and sketch into the folder 'PACS' of the data directory."
    default_split = "domain_halves"

    def read_folder(self, folder: Path) -> Dataset:
        x, y, domain = read_domains(folder, _DOMAINS, _CLASSES, {"art_painting": ("art painting",)}, self.size)
        return Dataset(name=self.name, x=x, y=y, classes=7, class_names=_CLASSES, groups={"domain": domain},
                       group_names={"domain": _DOMAINS}, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
