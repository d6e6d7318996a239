"""FEMNIST: the letters and digits of EMNIST, by writer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ...options import option
from .. import directory as places
from ..dataset import Dataset
from ._files import check_labels
from ._idx_images import read_pair
from .base import Download, Source, Wanted

_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_IDX = tuple(f"emnist-byclass-{part}-{what}-ubyte.gz" for part in ("train", "test") for what in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class Femnist(Source):
    """Images of 28×28 in 62 classes, in one of two public formats.

    "leaf": the JSON files of LEAF's preprocessing, in train/ and test/ (or all_data/); samples carry the group "writer".
    LEAF stores ink as 0 and paper as 1; that is kept. "emnist": the four idx files of EMNIST ByClass, whose images are
    stored on their side and are turned upright here; they do not name the writers.
    """

    format: str = option("leaf", "which files to read", choices=("leaf", "emnist"))

    name = "femnist"
    title = "handwritten letters and digits, 28×28, 62 classes, by writer (LEAF) or not (EMNIST ByClass)"
    folders = ("femnist", "femnist/data", "FEMNIST", "EMNIST", "EMNIST/raw", "emnist", "gzip")
    files = (*(Wanted(f"{p}/", optional=True) for p in ("train", "test", "all_data")), *(Wanted(n, optional=True) for n in _IDX))
    downloads = (Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "emnist", "58c8d27c78d21e728a6bc7b3cc06412e"),)
    how_to_get = ("for LEAF's files run its data/femnist/preprocess.sh and put data/train and data/test into the folder 'femnist'; "
                  "for EMNIST unpack gzip.zip in the folder 'emnist' and write femnist(format=emnist).")
    default_split = "by_group(group='writer', min_size=10)"

    def read(self, directory: str | Path | None = None) -> Dataset:
        tried = places.candidates(self, directory) + [f / "gzip" for f in places.candidates(self, directory)]
        for folder in tried:
            if self._files(folder):
                return self.read_folder(folder)
        what = "train/*.json" if self.format == "leaf" else _IDX[0]
        where = "\n".join(f"  {f}" for f in tried)
        raise DataError(f"Data set {self.name!r} is not here: {what!r} was not found. Looked in\n{where}\n"
                        f"{places.how_to_get(self)}")

    def _files(self, folder: Path) -> list[Path]:
        """What is there in the chosen format; nothing if it is incomplete."""
        if self.format == "emnist":
            found = [folder / n for n in _IDX if (folder / n).is_file()]
            return found if len(found) == 4 else []
        return sorted(p for part in ("train", "test", "all_data") for p in (folder / part).glob("*.json"))

    def read_folder(self, folder: Path) -> Dataset:
        if self.format == "emnist":
            return self._emnist(folder)
        images, labels, writers, tests = [], [], [], []
        names: dict[str, int] = {}
        for path in self._files(folder):
            for user, x, y in _leaf(path):
                images.append(x)
                labels.append(check_labels(y, 62, path))
                writers.append(torch.full_like(y, names.setdefault(user, len(names))))
                tests.append(torch.full_like(y, path.parent.name == "test", dtype=torch.bool))
        test = torch.cat(tests)
        return Dataset(name=self.name, x=torch.cat(images), y=torch.cat(labels), classes=62, class_names=_CLASSES,
                       official_test=test.nonzero().flatten(), roles=torch.where(test, 2, 0) if bool(test.any()) else None,
                       groups={"writer": torch.cat(writers)}, group_names={"writer": tuple(names)})

    def _emnist(self, folder: Path) -> Dataset:
        (x, y), (x_test, y_test) = (read_pair(folder / _IDX[i], folder / _IDX[i + 1], 62) for i in (0, 2))
        upright = torch.cat([x, x_test]).transpose(2, 3).contiguous()
        return Dataset(name=self.name, x=upright, y=torch.cat([y, y_test]), classes=62, class_names=_CLASSES,
                       official_test=torch.arange(len(y), len(y) + len(y_test)))


def _leaf(path: Path) -> list[tuple[str, Tensor, Tensor]]:
    """(writer, images, labels) for each writer of a LEAF file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        users = [(str(u), document["user_data"][u]) for u in document["users"]]
        counts = document.get("num_samples") or [len(d["y"]) for _, d in users]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"The file {path} is not LEAF's JSON (users, num_samples, user_data): {error!r}.") from None
    out = []
    for (user, data), count in zip(users, counts):
        try:
            x = np.asarray(data["x"], np.float32)
            y = torch.tensor(data["y"], dtype=torch.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"Writer {user!r} of {path} must have lists x and y: {error!r}.") from None
        if x.shape != (count, 784) or len(y) != count:
            raise DataError(f"Writer {user!r} of {path} must have {count} images of 784 numbers and as many labels. "
                            f"Got {x.shape} and {len(y)} instead.")
        if count:
            out.append((user, torch.from_numpy((x * 255).round().clip(0, 255).astype(np.uint8)).reshape(-1, 1, 28, 28), y))
    return out
