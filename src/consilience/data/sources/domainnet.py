"""DomainNet: the ten classes and six domains that FedBN and FedFA use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ... import rng
from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ..splits.fractions import domainnet_counts
from ._files import read_lines
from ._images import read_images
from .base import Download, Source, Wanted

_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_CLASSES = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
_LISTS = tuple(f"{d}_{part}.txt" for d in _DOMAINS for part in ("train", "test"))
_SITE = "http://csr.bu.edu/ftp/visda/2019/multi-source/"


@dataclass(frozen=True)
class DomainNet(Source):
    """Images of ten classes in six domains, named by the official lists <domain>_train.txt and <domain>_test.txt.

    Lines of a list read 'clipart/bird/clipart_029_000001.jpg 29'; the class is the folder's name. Parts
    (test="published"): with lists="fedfa" the images of both lists are drawn anew, four fifths of them a training list, as
    the counts of FedFA's Table 12 ask; with "official" the two lists stay as they are. Of a training list the first
    0.8 · fraction is trained on and the last fifth is validation. The official lists are sorted by class, so the order of
    a training list is drawn, except with order="file" (for FedFA's own lists, written out as text).
    """

    size: int = option(256, "images are resized to this many pixels, height and width", low=8)
    fraction: float = option(0.4, "FedFA's train_ratio; Table 12 needs 0.4", above=0.0, high=1.0)
    lists: str = option("fedfa", "which images are in the training list", choices=("fedfa", "official"))
    order: str = option("drawn", "the order of a training list", choices=("drawn", "file"))
    seed: int = option(0, "which images are in which part", low=0)

    name = "domainnet"
    title = "images of 10 classes in 6 domains (FedBN's and FedFA's selection of DomainNet)"
    folders = ("domainnet", "DomainNet", "domain_net")
    files = (*(Wanted(n, also=(f"splits/{n}", f"lists/{n}")) for n in _LISTS), *(Wanted(f"{d}/") for d in _DOMAINS))
    downloads = tuple(Download(url, to) for d in _DOMAINS for url, to in (
        (f"{_SITE}{'groundtruth/' if d in ('clipart', 'painting') else ''}{d}.zip", "domainnet"),
        (f"{_SITE}domainnet/txt/{d}_train.txt", f"domainnet/{d}_train.txt"),
        (f"{_SITE}domainnet/txt/{d}_test.txt", f"domainnet/{d}_test.txt")))
    how_to_get = "put the six domain folders and the lists <domain>_train.txt, <domain>_test.txt into the folder 'domainnet'."
    default_split = "by_group(group='domain')"
    default_test = "published"

    def read_folder(self, folder: Path) -> Dataset:
        found = {w.path: p for w, p in self.sources_of(folder)}
        paths: list[Path] = []
        labels: list[int] = []
        domain: list[int] = []
        listed: list[int] = []
        for number, name in enumerate(_DOMAINS):
            for part in (0, 2):
                at = found[f"{name}_{'train' if part == 0 else 'test'}.txt"]
                assert at is not None
                for path, label in _listed(at, folder):
                    paths.append(path)
                    labels.append(label)
                    domain.append(number)
                    listed.append(part)
        group, old = torch.tensor(domain), torch.tensor(listed)
        roles = self._roles(group, old)
        return Dataset(name=self.name, x=read_images(paths, self.size), y=torch.tensor(labels), classes=10, class_names=_CLASSES,
                       groups={"domain": group}, group_names={"domain": _DOMAINS}, roles=roles,
                       official_test=(roles == 2).nonzero().flatten())

    def _roles(self, domain: Tensor, listed: Tensor) -> Tensor:
        """0 train, 1 validation, 2 test; −1 for what the fraction leaves out."""
        roles = torch.full_like(domain, -1)
        for number, name in enumerate(_DOMAINS):
            key = rng.key(self.seed, self.name, name)
            rows = (domain == number).nonzero().flatten()
            if self.lists == "fedfa":
                n_list = int(0.8 * len(rows))
                rows = rows[rng.permutation(rng.key(key, "lists"), len(rows))]
                train, test = rows[:n_list], rows[n_list:]
            else:
                train, test = rows[listed[rows] == 0], rows[listed[rows] == 2]
            roles[test] = 2
            n_train, n_val, _ = domainnet_counts(len(train), len(test), self.fraction)
            if self.order == "drawn":
                train = train[rng.permutation(rng.key(key, "order"), len(train))]
            roles[train[:n_train]] = 0
            roles[train[len(train) - n_val:]] = 1
        return roles


def _listed(path: Path, folder: Path) -> list[tuple[Path, int]]:
    """The images of the ten classes on a list."""
    out = []
    for number, line in enumerate(read_lines(path), 1):
        parts = line.rsplit(" ", 1)[0].split("/")
        if len(parts) < 3:
            raise DataError(f"Line {number} of {path} must read <domain>/<class>/<file> <number>. Got {line!r} instead.")
        if parts[-2] in _CLASSES:
            file = folder.joinpath(*parts[-3:])
            if not file.is_file():
                raise DataError(f"Line {number} of {path} names {'/'.join(parts[-3:])!r}, which is not in {folder}.")
            out.append((file, _CLASSES.index(parts[-2])))
    if not out:
        raise DataError(f"The list {path} names no image of the ten classes {', '.join(_CLASSES)}.")
    return out
