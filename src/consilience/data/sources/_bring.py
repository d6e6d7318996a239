"""What users bring: paths, and arrays of any usual layout as a `Dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import memory
from ...errors import ConfigError, DataError
from .. import directory as places
from ..dataset import Dataset


def find_path(path: str, source: str, directory: str | Path | None) -> Path:
    """The path as given, or else inside the data directory."""
    if not path:
        raise ConfigError(f"Source {source!r} needs to know where your files are, as in {source}(path=\"…\").")
    given = Path(path).expanduser()
    tried = [given] if given.is_absolute() else [given, places.data_directory(directory) / given]
    for at in tried:
        if at.exists():
            return at
    where = " and ".join(str(t.absolute()) for t in tried)
    raise DataError(f"Source {source!r}: {str(given)!r} does not exist. Looked for {where}.")


def samples(x: Any, where: str) -> Tensor:
    """uint8 images as (N, channels, height, width), real numbers as float32, whole numbers as int64.

    Images of bytes may come without channels (N, height, width) or with 1, 3 or 4 channels last; 1 or 3 in the second place
    are channels already.
    """
    x = torch.as_tensor(np.asarray(x) if not isinstance(x, Tensor) else x)
    if x.dim() < 2:
        raise DataError(f"{where}: samples must have at least two dimensions (samples, features). Got {tuple(x.shape)} instead.")
    if x.dtype == torch.uint8:
        if x.dim() == 3:
            x = x[:, None]
        elif x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3, 4):
            x = x.permute(0, 3, 1, 2)
        return x.contiguous()
    if x.is_floating_point():
        if not _finite(x):
            raise DataError(f"{where}: some features are not finite (missing values?). Fill or drop them first.")
        return x.float().contiguous()
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
        return x.long().contiguous()
    raise DataError(f"{where}: samples must be numbers. Got {x.dtype} instead.")


def _finite(x: Tensor) -> bool:
    """Looked at in pieces, for it may be larger than the memory."""
    for piece in x.split(max(1, 2**24 // max(1, x[:1].numel()))):
        if not bool(torch.isfinite(piece).all()):
            return False
        memory.let_go([x])
    return True


def numbered(values: Sequence[Any] | np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
    """Numbers of the sorted distinct values, and the values as text. Numbers sort as numbers."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iu":                 # the usual case, and there may be millions
            known, place_of = np.unique(values, return_inverse=True)
            return torch.from_numpy(place_of.reshape(-1).astype(np.int64, copy=False)), tuple(str(v) for v in known.tolist())
        values = values.tolist()
    plain = [v.item() if hasattr(v, "item") else v for v in values]
    distinct = set(plain)
    try:
        order = sorted(distinct, key=lambda v: (float(v), str(v)))
    except (TypeError, ValueError):
        order = sorted(distinct, key=str)
    place = {v: i for i, v in enumerate(order)}
    return torch.tensor([place[v] for v in plain], dtype=torch.int64), tuple(str(v) for v in order)


def from_arrays(x: Any, y: Any, client: Any = None, *, name: str = "arrays", classes: int | None = None,
                test: Any = None, where: str = "arrays") -> Dataset:
    """A `Dataset` from arrays or tensors, for `load`.

    y         whole numbers from 0 are used as they are; anything else (text, gaps are fine) is numbered in sorted order.
    client    who owns each sample, numbers or names; becomes the group "client".
    test      true for the samples of a test set that belongs to no client.
    """
    x = samples(x, where)
    plain = np.asarray(y).reshape(-1) if not isinstance(y, Tensor) else y.numpy().reshape(-1)
    if len(plain) != len(x):
        raise DataError(f"{where}: {len(x)} samples but {len(plain)} labels.")
    if not len(plain):
        raise DataError(f"{where}: there are no samples.")
    if plain.dtype.kind == "f" and (not np.isfinite(plain).all() or (plain != np.floor(plain)).any()):
        raise DataError(f"{where}: labels must be classes (whole numbers or names). Got real numbers such as {plain[0]!r}.")
    names: tuple[str, ...] = ()
    if plain.dtype.kind in "iufb" and plain.min() >= 0 and (classes is not None or len(np.unique(plain)) == plain.max() + 1):
        labels = torch.from_numpy(plain.astype(np.int64))
    else:
        labels, names = numbered(plain)
    found = max(int(labels.max()) + 1, len(names))
    if classes is not None and found > classes:
        raise DataError(f"{where}: labels must be 0 to {classes - 1}. Got {found - 1}.")
    groups, group_names = {}, {}
    if client is not None:
        owners = np.asarray(client).reshape(-1)
        if len(owners) != len(x):
            raise DataError(f"{where}: {len(x)} samples but {len(owners)} entries in client.")
        groups["client"], group_names["client"] = numbered(owners)
    chosen = np.asarray(test).reshape(-1).astype(bool) if test is not None else np.zeros(len(x), bool)
    if len(chosen) != len(x):
        raise DataError(f"{where}: {len(x)} samples but {len(chosen)} entries in test.")
    return Dataset(name=name, x=x, y=labels, classes=classes or max(found, 2), class_names=names,
                   official_test=torch.from_numpy(chosen).nonzero().flatten(), groups=groups, group_names=group_names)
