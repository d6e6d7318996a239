"""Tensors mapped from files, which the system reads as they are looked at, and memory given back to the system.

A mapped tensor looks like any other and must not be written to. Pages once read count as resident memory of the process until
they are let go of; the system keeps them cached, so letting go costs little.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
import tempfile
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MADV_DONTNEED = 4                 # on Linux and macOS; Python's own constant is absent where the call is


class _File(mmap.mmap):
    """A mapping that knows its file."""

    path = ""
    open_file: Any = None          # kept open where it has no name


_FILES: weakref.WeakValueDictionary[int, _File] = weakref.WeakValueDictionary()         # address -> mapping


def map_file(path: str | Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> Tensor:
    """The bytes of a file from `offset` on as a tensor, without reading them. The file may be larger than the memory."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")                        # that it must not be written to: nobody does
        mapping = _File(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapping.path = os.path.abspath(path)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        _FILES[whole.data_ptr()] = mapping
        return whole[offset: offset + count * dtype.itemsize].view(dtype).view(shape)


def spill(tensor: Tensor) -> Tensor:
    """The tensor in a temporary file, mapped. The file has no name in any folder, so nothing is left of it however the process ends;
    other processes reach it through this one. Itself where the system has no such thing (all but Linux).
    """
    if not Path("/proc/self/fd").is_dir() or tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    file = tempfile.TemporaryFile(dir=roomy_folder())                     # noqa: SIM115 (open as long as the mapping is)
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    file.flush()
    out = map_file(f"/proc/{os.getpid()}/fd/{file.fileno()}", tensor.dtype, tuple(tensor.shape))
    _FILES[out.untyped_storage().data_ptr()].open_file = file
    return out


def roomy_folder() -> str | None:
    """Where large temporary files go: TMPDIR's word counts; else not where a system may keep small ones in memory."""
    large = Path("/var/tmp")
    return str(large) if "TMPDIR" not in os.environ and os.access(large, os.W_OK) else None


def file_of(tensor: Tensor) -> str | None:
    """The file a tensor is mapped from, by us or by torch.from_file(shared=True); None for ordinary memory."""
    if tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    ours = _FILES.get(storage.data_ptr())
    if ours is not None:
        return ours.path
    path = storage.filename
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


def let_go(tensors: Iterable[Tensor]) -> None:
    """Give back the pages of mapped tensors that were looked at; ordinary tensors are left alone."""
    advise = _system_call("madvise")
    for tensor in tensors:
        if advise is not None and file_of(tensor) is not None:
            storage = tensor.untyped_storage()
            advise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _MADV_DONTNEED)      # advice, no more


def trim() -> None:
    """Give back what was freed. The C library of Linux keeps much of it for later, which after large passing arrays is for nothing."""
    if (trim_heap := _system_call("malloc_trim")) is not None:
        trim_heap(0)


@functools.cache
def _system_call(name: str) -> Any:
    """A function of the C library, or None where there is no such thing."""
    try:
        return getattr(ctypes.CDLL(None), name) if os.name == "posix" else None
    except (OSError, AttributeError):
        return None


# PyTorch's words, on Linux and macOS, then on Windows; for more bytes, then for more rows, than 64 bits count.
_LACKING = re.compile(r"(?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes|Storage size calculation overflowed"
                      r"|integer multiplication overflow|argument 'size' .*Overflow when unpacking")


def no_room(error: BaseException) -> str | None:
    """What a user is told where the machine's memory did not suffice for one tensor or array; None for other errors."""
    found = _LACKING.search(str(error)) if isinstance(error, (RuntimeError, TypeError)) else None
    if found is not None:
        size = f"{int(found[1]) / 1e9:,.1f} GB were asked for at once" if found[1] else "more was asked for at once than any machine has"
    elif isinstance(error, MemoryError):
        size = str(error).rstrip(".") or "none is left"
    else:
        return None
    return (f"This machine's memory does not suffice: {size}. Use a smaller model, smaller samples (size=…), a smaller batch or "
            "eval_batch, or fewer clients a round (participation).")
