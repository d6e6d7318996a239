"""Values passed between processes: tensors lie in shared memory, only a small description travels through a pipe.

A region is a growing file mapped by both sides, on the memory file system where there is one. A parcel is anything that can
be pickled; its tensors are laid into the region, and the pickle says where. Tensors that are themselves mapped from a file
are not copied at all: the other side maps the same file.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError

ALIGN = 64
_MEMORY_FILES = Path("/dev/shm")


class Parcel(NamedTuple):
    """What travels: the name of the mapped file and the pickle without its tensors."""

    file: str
    content: bytes


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
        out = io.BytesIO()
        pickler = _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dump(value)
        if self.path is None or pickler.size > len(self.memory):
            self._grow(pickler.size)
        for place, tensor in pickler.placed:
            _view(self.memory, place).copy_(tensor)
        assert self.path is not None
        return Parcel(self.path.name, out.getvalue())


class Reader:
    """The reading side of any number of regions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, Tensor] = {}                     # region -> its newest file
        self._names: dict[str, str] = {}
        self._files: dict[str, mmap.mmap] = {}                 # data that are mapped from files of their own

    def read(self, parcel: Parcel, copy: bool) -> Any:
        """The value. Without a copy its tensors are the shared memory itself, and change when the writer writes again."""
        region = parcel.file.rpartition("-")[0]
        if self._names.get(region) != parcel.file:
            self._maps[region], self._names[region] = _map(self.folder / parcel.file), parcel.file
        return _Unpickler(io.BytesIO(parcel.content), self._maps[region], copy, self._files).load()

    def let_go(self) -> None:
        """Give back the pages of mapped data that were looked at. The system has them cached; a process that visits ever
        more clients should not hold ever more of them.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files.values():
                file.madvise(mmap.MADV_DONTNEED)


class _Place(NamedTuple):
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None                             # None: contiguous
    parameter: bool


def _view(memory: Tensor, place: _Place) -> Tensor:
    count = 1
    for n in place.shape:
        count *= n
    flat = memory[place.offset: place.offset + count * place.dtype.itemsize].view(place.dtype)
    return flat.view(place.shape) if place.stride is None else flat.as_strided(place.shape, place.stride, flat.storage_offset())


class _Pickler(pickle.Pickler):
    """Gives every tensor a place instead of pickling it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = 0
        self.placed: list[tuple[_Place, Tensor]] = []
        self._known: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = _file_of(value) or self._place(value)
        return self._known[id(value)]

    def _place(self, tensor: Tensor) -> _Place:
        # A convolution looks at strides to choose its kernel, so channels_last must arrive as it left, one channel included.
        keep = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        place = _Place(self.size, tensor.dtype, tuple(tensor.shape), tensor.stride() if keep else None,
                       isinstance(tensor, nn.Parameter))
        self.size += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        self.placed.append((place, tensor.detach()))
        return place


class _File(NamedTuple):
    path: str
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _file_of(tensor: Tensor) -> _File | None:
    """The file a tensor is mapped from, shared with the disk; None for ordinary memory."""
    if tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    path = storage.filename
    if path is None or not os.path.isfile(path):
        return None
    return _File(os.path.abspath(path), storage.nbytes(), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor, copy: bool, files: dict[str, mmap.mmap]) -> None:
        super().__init__(file)
        self.memory, self.copy, self.files = memory, copy, files
        self._known: dict[_Place, Tensor] = {}

    def persistent_load(self, place: Any) -> Tensor:
        if isinstance(place, _File):
            return self._from_file(place)
        if place not in self._known:
            tensor = _view(self.memory, place)
            if place.parameter:
                tensor = nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
            self._known[place] = tensor.clone() if self.copy and not place.parameter else tensor
        return self._known[place]

    def _from_file(self, place: _File) -> Tensor:
        if place.path not in self.files:
            with open(place.path, "rb") as file:               # nothing is ever written through it
                self.files[place.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(self.files[place.path], dtype=place.dtype, count=place.bytes // place.dtype.itemsize)
        return whole.as_strided(place.shape, place.stride, place.offset)

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            _import_main()
        return super().find_class(module, name)


MAIN = "CONSILIENCE_MAIN"          # set for workers: the script of the process that started them


def _import_main() -> None:
    """Bring in the classes of the user's script, which must not start training when it is imported."""
    path = os.environ.pop(MAIN, "")
    if path:
        found = runpy.run_path(path, run_name="__consilience_worker__")
        vars(sys.modules["__main__"]).update({k: v for k, v in found.items() if not k.startswith("__")})
