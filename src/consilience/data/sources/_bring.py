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

# How files and folders are called that hold parts of a data set rather than clients.
PARTS = {"train": "train", "training": "train", "test": "test", "testing": "test",
         "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation"}


def find_path(path: str, source: str, directory: str | Path | None) -> Path:
    """The path as given, or else inside the data directory."""
    if not path:
        raise ConfigError(f"Source {source!r} needs to know where your files are, as in {source}(path=\"…\").")
    given = Path(path).expanduser()
    tried = [given] if given.is_absolute() else [given, places.data_directory(directory) / given]
    for at in tried:
        if at.exists():
            return at
    where = " and ".join(dict.fromkeys(str(t.absolute()) for t in tried))
    raise DataError(f"Source {source!r}: {str(given)!r} does not exist. Looked for {where}.")


def samples(x: Any, where: str) -> Tensor:
    """uint8 images as (N, channels, height, width), real numbers as float32, whole numbers as int64.

    Images of bytes may come without channels (N, height, width) or with 1, 3 or 4 channels last; 1 or 3 in the second place
    are channels already.
    """
    if not isinstance(x, Tensor):
        x = np.asarray(x)
        if x.dtype.kind not in "iufbc":
            raise DataError(f"{where}: samples must be numbers. Got {x.dtype} instead. Text becomes numbers with x.astype('float32').")
        if x.dtype.kind == "u" and x.dtype.itemsize > 1:            # torch computes little with these
            x = x.astype(np.int64)
    x = torch.as_tensor(x).detach()                      # samples are data, whatever computed them
    if x.dim() < 2 or (len(x) and not x[:1].numel()):
        raise DataError(f"{where}: samples must have at least two dimensions (samples, features), none of them empty. "
                        f"Got {tuple(x.shape)} instead.")
    if x.dtype == torch.uint8:
        if x.dim() == 3:
            x = x[:, None]
        elif x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3, 4):
            x = x.permute(0, 3, 1, 2)
        return x.contiguous()
    if x.is_floating_point():
        x = x.float()                                    # first: a number beyond float32 becomes infinite here
        if (row := _not_finite(x)) is not None:
            raise DataError(f"{where}: row {row + 1} has features that are not finite in float32 (missing values, or numbers beyond "
                            "3.4e38?). Fill or drop such rows first.")
        return x.contiguous()
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
        _check_tokens(x, where)
        return x.long().contiguous()
    raise DataError(f"{where}: samples must be real or whole numbers. Got {x.dtype} instead.")


def _check_tokens(x: Tensor, where: str) -> None:
    """Whole numbers are tokens. Pictures and measurements that were stored as whole numbers are none."""
    mend = "Images, signals and features go as real numbers, x.astype('float32'), and images of 0 to 255 as bytes, x.astype('uint8')."
    if x.dim() != 2:
        raise DataError(f"{where}: whole numbers are taken for tokens, which have two dimensions (samples, tokens). Got {tuple(x.shape)} "
                        f"of {str(x.dtype).removeprefix('torch.')} instead. {mend}")
    if len(x) and int(x.min()) < 0:
        raise DataError(f"{where}: whole numbers are taken for tokens, which count from 0. Got {int(x.min())}. {mend}")


def _not_finite(x: Tensor) -> int | None:
    """The first sample that is not. Looked at in pieces, for it may be larger than the memory."""
    pieces = x.split(size := max(1, 2**24 // max(1, x[:1].numel())))
    for i, piece in enumerate(pieces):
        finite = torch.isfinite(piece)
        if not bool(finite.all()):
            return i * size + int(finite.flatten(1).all(1).logical_not().nonzero()[0])
        memory.let_go([x])
    return None


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

    y         whole numbers from 0 are used as they are; anything else (text, gaps are fine) is numbered in sorted order. A mask
              (height, width) for each image makes the task segmentation; its numbers are classes from 0.
    client    who owns each sample, numbers or names; becomes the group "client".
    test      true for the samples of a test set that belongs to no client.
    """
    x = samples(x, where)
    given = np.asarray(y) if not isinstance(y, Tensor) else y.numpy()
    masks = _masks(given, x, where)
    plain = given.reshape(-1)
    if len(plain) != len(x) and masks is None:
        raise DataError(f"{where}: {len(x)} samples but {len(plain)} labels.")
    if not len(plain):
        raise DataError(f"{where}: there are no samples.")
    check_missing(plain, "label", where)
    if plain.dtype.kind == "f":
        odd = plain[~np.isfinite(plain) | (plain != np.floor(plain))]
        if len(odd):
            raise DataError(f"{where}: labels must be classes (whole numbers or names). Got real numbers such as {odd[0]}.")
    names: tuple[str, ...] = ()
    if masks is not None:
        labels = _mask_classes(masks, classes, where)
    elif plain.dtype.kind in "iufb" and plain.min() >= 0 and (classes is not None or len(np.unique(plain)) == plain.max() + 1):
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
        check_missing(owners, "client", where)
        groups["client"], group_names["client"] = numbered(owners)
    chosen = np.asarray(test).reshape(-1).astype(bool) if test is not None else np.zeros(len(x), bool)
    if len(chosen) != len(x):
        raise DataError(f"{where}: {len(x)} samples but {len(chosen)} entries in test.")
    return Dataset(name=name, x=x, y=labels, classes=classes or max(found, 2), class_names=names,
                   official_test=torch.from_numpy(chosen).nonzero().flatten(), groups=groups, group_names=group_names,
                   task="classification" if masks is None else "segmentation")


def check_missing(values: np.ndarray, what: str, where: str) -> None:
    """An empty entry is no class and no client: rows without one would silently become one of their own."""
    kind = values.dtype.kind
    if kind in "iub":
        return
    missing = np.isnan(values) if kind == "f" else np.fromiter((_is_missing(v) for v in values.tolist()), bool, len(values))
    if missing.any():
        at = int(missing.argmax())
        more = f" and {int(missing.sum()) - 1} more" if missing.sum() > 1 else ""
        raise DataError(f"{where}: row {at + 1}{more} has no {what} (got {values[at:at + 1].tolist()[0]!r}). Fill it in, or leave "
                        "such rows out.")


def _is_missing(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and value.strip().lower() in ("", "nan"))


def _masks(y: np.ndarray, x: Tensor, where: str) -> np.ndarray | None:
    """Labels with a shape of their own as masks (N, height, width); None where there is one label for each sample."""
    if y.ndim < 2 or y.size == len(y):
        return None
    size = tuple(x.shape[-2:])
    if x.dim() == 4 and len(y) == len(x) and y.ndim == 4 and y.shape[1] == 1:
        y = y[:, 0]
    if x.dim() != 4 or y.shape != (len(x), *size) or y.dtype.kind not in "iufb":
        raise DataError(f"{where}: labels of shape {tuple(y.shape)} do not fit samples of shape {tuple(x.shape)}: one class for each "
                        "sample was expected (one-hot labels become classes with y.argmax(1)), or one mask (height, width) for each image.")
    return y


def _mask_classes(masks: np.ndarray, classes: int | None, where: str) -> Tensor:
    """Masks as class numbers; other codes, as 255 for the foreground, must be numbered by whoever knows what they mean."""
    known = np.unique(masks)
    if known[0] < 0 or (classes is None and not np.array_equal(known, np.arange(len(known)))):
        shown = ", ".join(f"{v:g}" for v in known[:6]) + (", …" if len(known) > 6 else "")
        raise DataError(f"{where}: masks must hold the classes 0, 1, … of every pixel. Got the values {shown}. Number them first, as in "
                        "y = (y > 0).astype('uint8'); where some class is in no mask, say how many there are with classes=…")
    return torch.from_numpy(masks.astype(np.int64))
