"""Domain folders of class folders of images: PACS, Office-Caltech-10, and what users bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ... import rng
from ...errors import DataError
from ..splits.fractions import Counts
from ._images import class_files, read_images

Aliases = dict[str, tuple[str, ...]]


def domain_files(folder: Path, domains: Sequence[str], classes: Sequence[str],
                 aliases: Aliases) -> tuple[list[Path], Tensor, Tensor]:
    """Image files, labels and domain numbers, domain by domain, class by class, by file name."""
    paths: list[Path] = []
    labels: list[int] = []
    domain: list[int] = []
    for number, name in enumerate(domains):
        at = next((folder / n for n in (name, *aliases.get(name, ())) if (folder / n).is_dir()), None)
        if at is None:
            raise DataError(f"The folder {folder} lacks the domain folder {name!r}. It must hold: {', '.join(domains)}.")
        files, of_class = class_files(at, classes, aliases)
        paths += files
        labels += of_class
        domain += [number] * len(files)
    return paths, torch.tensor(labels), torch.tensor(domain)


def read_domains(folder: Path, domains: Sequence[str], classes: Sequence[str], aliases: Aliases,
                 size: int) -> tuple[Tensor, Tensor, Tensor]:
    paths, y, domain = domain_files(folder, domains, classes, aliases)
    return read_images(paths, size), y, domain


def draw_roles(rows: Tensor, sizes: Counts, key: Tensor, roles: Tensor) -> None:
    """Write 0, 1, 2 for train, validation and test at drawn rows; validation follows the training rows, test is last."""
    if sum(sizes) > len(rows):
        raise DataError(f"{sizes.train} training, {sizes.val} validation and {sizes.test} test images were asked for, but there "
                        f"are {len(rows)}.")
    rows = rows[rng.permutation(key, len(rows))]
    roles[rows[:sizes.train]] = 0
    roles[rows[sizes.train:sizes.train + sizes.val]] = 1
    roles[rows[len(rows) - sizes.test:]] = 2
