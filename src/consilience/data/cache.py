"""Data sets as files to be mapped: written once from what a source reads, under the data directory, and used in its place.

A cached data set belongs to a source with its settings and to the files it was read from, by name, size and time of change. Files
of a source that changed make another one; old ones can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..memory import map_file
from . import directory as places
from .dataset import Dataset
from .sources import Source

FOLDER = ".mapped"                # of the data directory
A_DAY = 86400.0                   # seconds
_PLAIN = ("name", "classes", "class_names", "group_names", "mean", "std", "task", "feature_names")
_TYPES = {torch.uint8: "|u1", torch.float32: "<f4", torch.int64: "<i8"}


def read_mapped(source: Source, directory: str | Path | None = None) -> Dataset:
    """What the source reads, its samples mapped from a file. The first time it is read as ever, and needs the memory for that."""
    folder = places.data_directory(directory) / FOLDER / f"{source.name}-{_code(source, directory)}"
    if (folder / "about.json").is_file():
        return _open(folder)
    dataset = source.read(directory)
    if type(dataset) is not Dataset or dataset.x.dtype not in _TYPES:
        return dataset                                   # text is numbered anew for every split
    try:
        _write(dataset, folder)
    except OSError as error:
        raise DataError(f"Cannot write the samples of {source.name!r} to {str(folder)!r} for mapping: {error.strerror or error}. "
                        "Free some space, name another data_dir, or leave map_data out.") from error
    return _open(folder)


def _code(source: Source, directory: str | Path | None) -> str:
    digest = hashlib.blake2b(source.text.encode(), digest_size=8)
    for path in sorted(_files(source, directory)):
        about = path.stat()
        digest.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files(source: Source, directory: str | Path | None) -> Iterator[Path]:
    """All files the source may read."""
    tops: list[Path] = []
    if source.needs_path:
        given = Path(str(getattr(source, "path", ""))).expanduser()
        tops = [at for at in (given, places.data_directory(directory) / given) if at.exists()][:1]
    elif source.folders and (found := places.locate(source, directory)) is not None:
        tops = [path for _, path in source.sources_of(found) if path is not None]
    for top in tops:
        if top.is_file():
            yield top
        for at, _, names in os.walk(top):
            yield from (Path(at) / name for name in names)


def _write(dataset: Dataset, folder: Path) -> None:
    drop_drafts(folder.parent)
    draft = folder.with_name(f"{folder.name}.draft-{_here()}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for name, tensor in _tensors(dataset):
            np.save(draft / f"{name}.npy", tensor.numpy())
        (draft / "about.json").write_text(json.dumps({k: getattr(dataset, k) for k in _PLAIN}, default=dict), encoding="utf-8")
        with open(draft / "about.json", "rb") as file:
            os.fsync(file.fileno())
        if not folder.exists():                          # another process may have been faster
            os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def drop_drafts(folder: Path) -> None:
    """Remove what killed processes left half-written: drafts of processes that lived where this one does and no longer live. Of others, on
    other machines that share the disk or before a restart, nobody here can tell; theirs go when nothing was written to them for a day.
    """
    for draft in folder.glob("*.draft-*"):
        place, _, process = draft.name.rpartition(".draft-")[2].partition("-")
        with contextlib.suppress(OSError):
            if _lives(int(process)) if place == _here() and process.isdecimal() else time.time() - _touched(draft) < A_DAY:
                continue
            gone = folder / f"gone.draft-{_here()}-{os.getpid()}"       # so that whoever does still write finds nothing, and not a part
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(draft, gone)
            shutil.rmtree(gone, ignore_errors=True)


@cache
def _here() -> str:
    """Where a process's number means that process: this start of this machine, and its space of numbers (a container has its own)."""
    told = [platform.node()]
    with contextlib.suppress(OSError):
        told += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(os.stat("/proc/self/ns/pid").st_ino)]
    return hashlib.blake2b("\0".join(told).encode(), digest_size=6).hexdigest()


def _lives(process: int) -> bool:
    """Whether there is such a process; where nobody can ask without harm, on Windows, it counts as alive."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:                              # somebody else's
        return True
    return True


def _touched(draft: Path) -> float:
    """When something was last written there."""
    return max(path.stat().st_mtime for path in (draft, *draft.glob("*")))


def _tensors(dataset: Dataset) -> Iterator[tuple[str, Tensor]]:
    yield from (("x", dataset.x.contiguous()), ("y", dataset.y), ("official_test", dataset.official_test))
    if dataset.roles is not None:
        yield "roles", dataset.roles
    for name, group in dataset.groups.items():
        yield f"group-{name}", group


def _open(folder: Path) -> Dataset:
    try:
        about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in folder.glob("*.npy")}
        x = arrays.pop("x")
        dtype = next(t for t, code in _TYPES.items() if code == x.dtype.str)
        held = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        return Dataset(about["name"], map_file(folder / "x.npy", dtype, x.shape, x.offset), held["y"], about["classes"],
                       tuple(about["class_names"]), held["official_test"],
                       {k.removeprefix("group-"): t for k, t in held.items() if k.startswith("group-")},
                       {k: tuple(v) for k, v in about["group_names"].items()}, held.get("roles"), tuple(about["mean"]),
                       tuple(about["std"]), about["task"], tuple(about.get("feature_names", ())))      # which older folders lack
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise DataError(f"The mapped samples in {str(folder)!r} cannot be read ({error!r}). Delete that folder: "
                        "it is made again.") from None
