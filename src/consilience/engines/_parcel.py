"""Values passed between processes: tensors lie in shared memory, only a small description travels through a pipe.

A region is a growing file mapped by both sides, on the memory file system where there is one. A parcel is a plain value
(`_plain`): its tensors are laid into the region, and a JSON document says where. Tensors that are themselves mapped from a file
are not copied at all: the other side maps the same file.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import memory
from ..errors import ConfigError
from . import _plan
from ._plain import decode, encode

ALIGN = 64
_MEMORY_FILES = Path("/dev/shm")


class Parcel(NamedTuple):
    """What travels: the name of the mapped file, a document, and where in the file its tensors are."""

    file: str
    content: Any
    places: list[Any]


def shared_folder() -> Path:
    """A new folder for regions: in memory where the system offers that, else where temporary files lie."""
    usable = _MEMORY_FILES.is_dir() and os.access(_MEMORY_FILES, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="consilience-", dir=_MEMORY_FILES if usable else None))


def _reserve(handle: int, size: int, path: Path) -> None:
    """Take the room now: a file without room behind it would end the process at the first write."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.ftruncate(handle, size)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise ConfigError(f"The workers need {size / 2**20:.0f} MiB of shared memory in {str(path.parent.parent)!r}, where "
                          f"{free / 2**20:.0f} MiB are free. Enlarge it (docker: --shm-size), map the data from a file, or use "
                          "engine=sequential.") from error


def _map(path: Path, size: int | None = None) -> Tensor:
    """A file's bytes as a tensor; with a size, a new file."""
    handle = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0) | getattr(os, "O_BINARY", 0), 0o600)
    try:
        if size:
            _reserve(handle, size, path)
        return torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
    finally:
        os.close(handle)


class Region:
    """The writing side. What was written before is overwritten; whoever reads must be done with it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.memory = torch.zeros(0, dtype=torch.uint8)
        self.path: Path | None = None
        self._files = 0

    def _grow(self, size: int) -> None:
        self.drop()
        self._files += 1
        path = self.folder / f"{self.name}-{self._files}"
        self.memory = _map(path, max(size + size // 4, mmap.PAGESIZE))
        self.path = path

    def drop(self) -> None:
        self.memory = torch.zeros(0, dtype=torch.uint8)
        if self.path is not None:
            with contextlib.suppress(OSError):          # Windows keeps what is mapped; the folder goes at the end
                self.path.unlink()
            self.path = None

    @torch.no_grad()
    def write(self, value: Any) -> Parcel:
        places = _Places()
        return self._lay(encode(value, places.number), places)

    @torch.no_grad()
    def write_plan(self, value: Any) -> Parcel:
        """What only a pickle can hold; it lies in the region as well. For `Reader.read_plan`."""
        places = _Places()
        pickled = torch.frombuffer(bytearray(_plan.dump(value, places.number)), dtype=torch.uint8)
        return self._lay(places.number(pickled), places)

    def _lay(self, document: Any, places: _Places) -> Parcel:
        if self.path is None or places.size > len(self.memory):
            self._grow(places.size)
        for place, tensor in places.laid:
            _view(self.memory, place).copy_(tensor)
        assert self.path is not None
        return Parcel(self.path.name, document, places.all)


class Reader:
    """The reading side of any number of regions. `orders`: functions may be named in what is read, as a worker is told its task."""

    def __init__(self, folder: Path, orders: bool = False) -> None:
        self.folder, self.orders = folder, orders
        self._maps: dict[str, Tensor] = {}                     # region -> its newest file
        self._names: dict[str, str] = {}
        self._files: dict[str, tuple[Any, Tensor]] = {}        # data that are mapped from files of their own, and which file it was

    def read(self, parcel: Any, copy: bool) -> Any:
        """The value. Without a copy its tensors are the shared memory itself, and change when the writer writes again."""
        file, document, places = parcel
        return decode(document, self._tensors(file, places, copy), self.orders)

    def read_plan(self, parcel: Any) -> Any:
        """What the process that started this one wrote with `write_plan`. Its tensors are the shared memory itself."""
        file, document, places = parcel
        tensor = self._tensors(file, places, copy=False)
        return _plan.load(tensor(document).numpy().tobytes(), tensor)

    def _tensors(self, file: str, places: list[Any], copy: bool) -> Callable[[int], Tensor]:
        region = file.rpartition("-")[0]
        if self._names.get(region) != file:
            self._maps[region], self._names[region] = _map(self.folder / Path(file).name), file
        shared, known = self._maps[region], dict[int, Tensor]()

        def tensor(number: int) -> Tensor:
            if number not in known:
                place = places[number]
                at = self._from_file(_File(*place)) if isinstance(place[0], str) else _view(shared, _Place(*place))
                known[number] = at.clone() if copy else at
            return known[number]
        return tensor

    def _from_file(self, place: _File) -> Tensor:
        now = os.stat(place.path)
        which = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns      # a path, above all /proc/…/fd/7, may come to mean another file
        if place.path not in self._files or self._files[place.path][0] != which:
            self._files[place.path] = which, memory.map_file(place.path, torch.uint8, (now.st_size,))
        whole, dtype = self._files[place.path][1], _DTYPES[place.dtype]
        return whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(place.shape, place.stride, place.offset)

    def let_go(self) -> None:
        """Give back the pages of mapped data that were looked at. The system has them cached; a process that visits ever
        more clients should not hold ever more of them.
        """
        memory.let_go(whole for _, whole in self._files.values())


class _Place(NamedTuple):
    """Where a tensor lies in a region."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None                             # None: contiguous


class _File(NamedTuple):
    """Where a tensor lies in a file of its own."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_DTYPES = {str(t): t for t in vars(torch).values() if isinstance(t, torch.dtype)}


def _view(region: Tensor, place: _Place) -> Tensor:
    dtype = _DTYPES[place.dtype]
    flat = region[place.offset: place.offset + math.prod(place.shape) * dtype.itemsize].view(dtype)
    return flat.view(place.shape) if place.stride is None else flat.as_strided(place.shape, place.stride, flat.storage_offset())


class _Places:
    """Gives every tensor of a value a number and a place."""

    def __init__(self) -> None:
        self.size = 0
        self.all: list[_Place | _File] = []
        self.laid: list[tuple[_Place, Tensor]] = []
        self._known: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = len(self.all)
            self.all.append(_file_of(tensor) or self._place(tensor))
        return self._known[id(tensor)]

    def _place(self, tensor: Tensor) -> _Place:
        # A convolution looks at strides to choose its kernel, so channels_last must arrive as it left, one channel included.
        keep = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        place = _Place(self.size, str(tensor.dtype), tuple(tensor.shape), tensor.stride() if keep else None)
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        self.laid.append((place, tensor.detach()))
        return place


def _file_of(tensor: Tensor) -> _File | None:
    """The file a tensor is mapped from, shared with the disk; None for ordinary memory."""
    path = memory.file_of(tensor)
    return _File(path, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())) if path else None
