"""UCI HAR: what thirty people's telephones felt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._files import check_labels
from .base import Download, Source, Wanted

_SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
_ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
_LENGTH = 128


@dataclass(frozen=True)
class UciHar(Source):
    """10,299 windows of 128 readings of nine inertial signals, by 30 subjects; float32 (9, 1, 128).

    The published test set holds the windows of nine of the subjects, so both parts are divided by default (DBE's thirty
    clients). The released code of DBE reshapes (128, 9) to (9, 1, 128), which mixes signals and time; transpose=false does that.
    """

    transpose: bool = option(True, "signals as channels; false reproduces the released reshape")

    name = "uci_har"
    title = "10,299 windows of nine inertial signals, 30 subjects, 6 activities"
    kind = "signals"
    folders = ("UCI HAR Dataset", "uci_har", "uci_har/UCI HAR Dataset", "HAR")
    files = tuple(Wanted(f"{p}/{f}_{p}.txt") for p in ("train", "test")
                  for f in ("y", "subject", *(f"Inertial Signals/{s}" for s in _SIGNALS)))
    downloads = (Download("https://archive.ics.uci.edu/ml/machine-learning-databases/00240/UCI%20HAR%20Dataset.zip", ""),)
    how_to_get = "unpack 'UCI HAR Dataset.zip' in the data directory."
    default_split = "by_group(group='subject')"
    default_pool = "all"

    def read_folder(self, folder: Path) -> Dataset:
        xs, ys, subjects = [], [], []
        for part in ("train", "test"):
            y = _numbers(folder / part / f"y_{part}.txt", 1).flatten().long() - 1
            ys.append(check_labels(y, 6, folder / part / f"y_{part}.txt"))
            subjects.append(_numbers(folder / part / f"subject_{part}.txt", 1).flatten().long() - 1)
            signals = []
            for name in _SIGNALS:
                path = folder / part / "Inertial Signals" / f"{name}_{part}.txt"
                signals.append(_numbers(path, _LENGTH))
                if len(signals[-1]) != len(y):
                    raise DataError(f"The file {path} must have {len(y)} lines, one for each label. "
                                    f"Got {len(signals[-1])} instead.")
            x = torch.stack(signals, 1)                                         # (N, 9, 128)
            if not self.transpose:
                x = x.transpose(1, 2).reshape(-1, len(_SIGNALS), _LENGTH)
            xs.append(x[:, :, None])
        subject = torch.cat(subjects)
        return Dataset(name=self.name, x=torch.cat(xs).contiguous(), y=torch.cat(ys), classes=6, class_names=_ACTIVITIES,
                       official_test=torch.arange(len(ys[0]), len(subject)), groups={"subject": subject},
                       group_names={"subject": tuple(f"subject{i + 1}" for i in range(int(subject.max()) + 1))})


def _numbers(path: Path, columns: int) -> Tensor:
    """A table of numbers separated by spaces."""
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(f"The file {path} must hold lines of {columns} numbers separated by spaces: {error}.") from None
    if table.shape[1] != columns or not len(table) or not np.isfinite(table).all():
        raise DataError(f"The file {path} must hold lines of {columns} finite numbers. "
                        f"Got {table.shape[0]} × {table.shape[1]} instead.")
    return torch.from_numpy(table)
