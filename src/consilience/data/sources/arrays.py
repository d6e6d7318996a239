"""Your own NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._bring import find_path, from_arrays
from ._files import map_arrays, read_arrays
from .base import Source


@dataclass(frozen=True)
class Arrays(Source):
    """An .npz file with the arrays x and y, and if there are any client (who owns a sample) and test (true: test set).

    A folder may hold the same as x.npy, y.npy and so on; then x is not read but mapped, and may be larger than the memory. It must
    be in its final form: bytes (samples, channels, height, width), float32, or int64.

    Arrays in memory go through `consilience.data.from_arrays`, whose result `load` takes as a source.
    """

    path: str = option("", "the .npz file, or a folder of .npy files to be mapped")
    classes: int | None = option(None, "how many; without it, what the labels say", low=2)

    name = "arrays"
    title = "your arrays x, y and client, in an .npz file or a folder of .npy files"
    kind = "yours"
    needs_path = True
    default_split = ""
    how_to_get = 'write arrays(path="….npz").'

    def _held(self, directory: str | Path | None) -> tuple[Path, Mapping[str, Any]]:
        path = find_path(self.path, self.name, directory)
        return path, map_arrays(path) if path.is_dir() else read_arrays(path)

    def read_samples(self, directory: str | Path | None = None) -> Dataset:
        path, held = self._held(directory)
        if "x" not in held or "y" in held:
            return self.read(directory)
        plain = from_arrays(held["x"], np.zeros(len(held["x"]), np.int64), name=path.stem, where=str(path))
        return replace(plain, y=torch.full_like(plain.y, -1))

    def read(self, directory: str | Path | None = None) -> Dataset:
        path, held = self._held(directory)
        missing = [k for k in ("x", "y") if k not in held]
        if missing:
            what = "folder" if path.is_dir() else "file"
            raise DataError(f"The {what} {path} must hold the arrays x and y. It holds {', '.join(held) or 'none'}.")
        return from_arrays(held["x"], held["y"], held.get("client"), test=held.get("test"), name=path.stem,
                           classes=self.classes, where=str(path))
