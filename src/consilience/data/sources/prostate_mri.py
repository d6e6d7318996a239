"""Prostate MRI from six sites, as slices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import rng
from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ..splits.fractions import Counts, prostate_counts
from ._domains import draw_roles
from ._nifti import read_nifti
from .base import Source, Wanted

_SITES = ("BIDMC", "HK", "I2CVB", "BMC", "RUNMC", "UCL")


@dataclass(frozen=True)
class ProstateMri(Source):
    """1,856 slices from six hospitals, from <site>/Case00.nii.gz and Case00_segmentation.nii.gz; x (3, 384, 384), y a mask.

    Prepared as FedFA does: a volume is clipped to its smallest value and 99th percentile and scaled to 0–255; of its
    slices, all but the first and last whose mask is not empty are kept, each with its two neighbours as channels; mask
    values above 1 become 1. Every row has a part (test="published") with FedFA's counts (`fraction` 0.6 gives its Table 13, 0.1
    its mini version); which slice is in which part is drawn from `seed`.
    """

    fraction: float = option(0.6, "training slices of a site; never fewer than 32", above=0.0, high=0.6)
    size: int = option(384, "height and width that the slices must have", low=1)
    seed: int = option(0, "which slices are in which part", low=0)

    name = "prostate_mri"
    title = "1,856 slices of prostate MRI from 6 sites, with masks"
    kind = "volumes"
    folders = ("prostate_mri", "ProstateMRI", "prostate", "Prostate")
    files = tuple(Wanted(f"{s}/") for s in _SITES)
    how_to_get = ("put the six site folders of 'A Multi-site Dataset for Prostate MRI Segmentation' (liuquande.github.io/SAML) "
                  "into the folder 'prostate_mri' of the data directory.")
    default_split = "by_group(group='site')"
    default_test = "published"
    default_transform = "fedfa_prostate"

    def read_folder(self, folder: Path) -> Dataset:
        xs, ys, sites = [], [], []
        for number, name in enumerate(_SITES):
            x, y = self._site(folder / name)
            xs.append(x)
            ys.append(y)
            sites.append(torch.full((len(y),), number))
        site = torch.cat(sites)
        roles = torch.full_like(site, -1)
        for number, name in enumerate(_SITES):
            rows = (site == number).nonzero().flatten()
            n_train, n_val, n_test = prostate_counts(len(rows), self.fraction)
            sizes = Counts(min(n_train, len(rows) - n_val - n_test), n_val, n_test)     # a small site keeps its test slices
            draw_roles(rows, sizes, rng.key(self.seed, self.name, name), roles)
        return Dataset(name=self.name, x=torch.cat(xs), y=torch.cat(ys), classes=2, class_names=("background", "prostate"),
                       groups={"site": site}, group_names={"site": _SITES}, roles=roles,
                       official_test=(roles == 2).nonzero().flatten(), task="segmentation")

    def _site(self, folder: Path) -> tuple[Tensor, Tensor]:
        masks = sorted(p for p in folder.iterdir() if p.name.lower().endswith(("segmentation.nii.gz", "segmentation.nii")))
        if not masks:
            raise DataError(f"The folder {folder} must hold CaseNN.nii.gz and CaseNN_segmentation.nii.gz, but it holds no "
                            f"segmentation.")
        images, labels = [], []
        for path in masks:
            case = path.name[:path.name.lower().index("segmentation")].rstrip("_")
            image = next((folder / f"{case}{s}" for s in (".nii.gz", ".nii") if (folder / f"{case}{s}").is_file()), None)
            if image is None:
                raise DataError(f"The segmentation {path} has no image beside it: {case}.nii.gz was expected.")
            volume, mask = read_nifti(image), read_nifti(path)
            if volume.shape != mask.shape or volume.shape[1:] != (self.size, self.size):
                raise DataError(f"The volume {image} must have slices of {self.size} × {self.size} and a mask of the same shape. "
                                f"Got {volume.shape} and {mask.shape} (slices, rows, columns) instead.")
            volume = scale(volume)
            for i in range(1, len(mask) - 1):
                if mask[i].any():
                    images.append(torch.from_numpy(volume[i - 1:i + 2].copy()))
                    labels.append(torch.from_numpy((mask[i] > 0).astype(np.uint8)))
        if not images:
            raise DataError(f"No slice of {folder} between the first and the last of its volume has a mask.")
        return torch.stack(images), torch.stack(labels)


def scale(volume: np.ndarray) -> np.ndarray:
    """Clipped to [smallest, 99th percentile] and scaled to 0–255."""
    low, high = float(volume.min()), float(np.percentile(volume, 99))
    if high <= low:
        return np.zeros(volume.shape, np.uint8)
    return ((volume.astype(np.float64).clip(low, high) - low) / (high - low) * 255).astype(np.uint8)
