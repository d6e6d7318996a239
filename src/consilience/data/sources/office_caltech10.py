"""Office-Caltech-10: ten office things from four cameras and catalogues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ... import rng
from ...options import option
from ..dataset import Dataset
from ..splits.fractions import office_counts
from ._domains import draw_roles, read_domains
from .base import Source, Wanted

_DOMAINS = ("amazon", "caltech", "dslr", "webcam")
_CLASSES = ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector")
_ALIASES = {
    "amazon": ("Amazon",), "caltech": ("caltech10", "Caltech", "caltech_10"), "dslr": ("DSLR",), "webcam": ("Webcam",),
    "backpack": ("back_pack",), "bike": ("touring_bike", "touring-bike"), "headphones": ("headphone",),
    "keyboard": ("computer_keyboard", "computer-keyboard"), "laptop": ("laptop_computer",),
    "monitor": ("computer_monitor", "computer-monitor"), "mouse": ("computer_mouse", "computer-mouse"),
    "mug": ("coffee_mug", "coffee-mug"), "projector": ("video_projector", "video-projector"),
}


@dataclass(frozen=True)
class OfficeCaltech10(Source):
    """2,533 images in four domains and ten classes, from <domain>/<class>/ folders.

    Every row has a part (test="published") with the counts of FedFA's Table 11: a fifth of a domain is the test list, the
    rest is cut 60/40 into train and validation. FedFA's own lists are pickles, which are not read; which image is in which
    part is drawn from `seed` instead.
    """

    size: int = option(256, "images are resized to this many pixels, height and width", low=8)
    seed: int = option(0, "which images are in which part", low=0)

    name = "office_caltech10"
    title = "2,533 images in 4 domains (amazon, caltech, dslr, webcam), 10 classes"
    folders = ("office_caltech_10", "office_caltech10", "OfficeCaltech10", "office_caltech_10/office_caltech_10")
    files = tuple(Wanted(f"{d}/", also=tuple(f"{a}/" for a in _ALIASES.get(d, ()))) for d in _DOMAINS)
    how_to_get = "put the folders amazon, caltech, dslr and webcam into the folder 'office_caltech_10' of the data directory."
    default_split = "by_group(group='domain')"
    default_test = "published"

    def read_folder(self, folder: Path) -> Dataset:
        x, y, domain = read_domains(folder, _DOMAINS, _CLASSES, _ALIASES, self.size)
        roles = torch.full_like(domain, -1)
        for number, name in enumerate(_DOMAINS):
            rows = (domain == number).nonzero().flatten()
            draw_roles(rows, office_counts(len(rows)), rng.key(self.seed, self.name, name), roles)
        return Dataset(name=self.name, x=x, y=y, classes=10, class_names=_CLASSES, groups={"domain": domain},
                       group_names={"domain": _DOMAINS}, roles=roles, official_test=(roles == 2).nonzero().flatten())
