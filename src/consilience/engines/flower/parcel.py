"""What travels: a description in JSON and named arrays. Nothing is pickled, on the wire or on disk.

Arrays travel in NumPy's .npy form, which Flower and its modules read. We do not call np.load on what arrives: a header may
claim any shape, and np.load would reserve that much memory before it looks for the numbers. `Raw` is read only after its
declared shape and type, its header and its true length were found equal to what is expected.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import tree
from ...errors import ConsilienceError
from ...tree import Tree

HEADER = 1024                # most bytes of an array that are not numbers
LONGEST_ABOUT = 1 << 20      # most characters of a description
_TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "int64": torch.int64, "int32": torch.int32,
          "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool}
_NAMES = {v: k for k, v in _TYPES.items()}


class Refused(ConsilienceError):
    """An answer that is not used, and why."""


class Silent(Refused):
    """There was no answer, which says nothing against its sender."""


class Raw(NamedTuple):
    """An array as it travels: what its sender says of it, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(tensor: Tensor) -> Raw:
        array = tensor.detach().cpu().contiguous().numpy()
        out = io.BytesIO()
        np.lib.format.write_array(out, array, version=(1, 0), allow_pickle=False)
        return Raw(_NAMES[tensor.dtype], tuple(tensor.shape), out.getvalue())

    def read(self, name: str, like: Tensor) -> Tensor:
        """The tensor, which must have the shape and type of `like`; in its memory layout."""
        dtype, shape = _NAMES[like.dtype], tuple(like.shape)
        if self.dtype != dtype or tuple(self.shape) != shape:
            raise Refused(f"{name!r} is {plain(tuple(self.shape), 80)} {plain(self.dtype, 40)}, expected {shape} {dtype}")
        array = self._array(name, dtype, shape)
        return torch.empty_like(like).copy_(torch.from_numpy(array.copy()))

    def read_any(self, name: str) -> Tensor:
        """The tensor as its sender describes it; for what the server sends, whose shapes a site cannot know."""
        if self.dtype not in _TYPES:
            raise Refused(f"{name!r} has the unknown type {self.dtype[:40]!r}")
        return torch.from_numpy(self._array(name, self.dtype, tuple(self.shape)).copy())

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        expected = np.dtype(dtype)
        count = math.prod(shape)
        if not count * expected.itemsize < len(self.data) <= count * expected.itemsize + HEADER:
            raise Refused(f"{name!r} has {len(self.data)} bytes, expected about {count * expected.itemsize}")
        stream = io.BytesIO(self.data[:HEADER])
        try:
            version = np.lib.format.read_magic(stream)
            if version != (1, 0):
                raise ValueError(f"version {version}")
            found, by_column, found_type = np.lib.format.read_array_header_1_0(stream)
        except Exception as error:           # NumPy's reader raises a dozen kinds: the header is Python's own text, and anybody's here
            raise Refused(f"{name!r} is not an array: {plain(error, 200)}") from None
        if (found, found_type) != (shape, expected) or (by_column and len(shape) > 1):
            raise Refused(f"{name!r} says it is {shape} {dtype}, but its header {found} {found_type}")
        if len(self.data) - stream.tell() != count * expected.itemsize:
            raise Refused(f"{name!r} holds {len(self.data) - stream.tell()} bytes of numbers, expected {count * expected.itemsize}")
        return np.frombuffer(self.data, expected, count, stream.tell()).reshape(shape)


class Parcel(NamedTuple):
    """One message's content."""

    about: dict[str, Any]
    arrays: dict[str, Raw]

    @staticmethod
    def of(about: Mapping[str, Any], tensors: Tree | None = None) -> Parcel:
        return Parcel(dict(about), {path: Raw.of(leaf) for path, leaf in tree.paths(tensors or {})})

    @property
    def bytes(self) -> int:
        return sum(len(raw.data) for raw in self.arrays.values())


def write_about(about: Mapping[str, Any]) -> str:
    return json.dumps(about, allow_nan=False)


def read_about(text: object) -> dict[str, Any]:
    """A description as it arrives; anything but a table of plain values is refused."""
    if not isinstance(text, str) or len(text) > LONGEST_ABOUT:
        raise Refused("the description is no text, or longer than anything we send")
    try:
        about = json.loads(text, parse_constant=lambda word: float("nan"))
    except (ValueError, RecursionError):         # ValueError also for a number of more digits than Python reads
        raise Refused("the description is not JSON") from None
    if not isinstance(about, dict):
        raise Refused("the description is no table")
    return about


def whole_number(about: Mapping[str, Any], name: str) -> int:
    value = about.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Refused(f"{name!r} must be a whole number from 0 up, not {str(value)[:40]!r}")
    return value


def real_number(value: object, name: str) -> float:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except OverflowError:                        # a whole number of hundreds of digits
        pass
    raise Refused(f"{name!r} must be a finite number, not {str(value)[:40]!r}")


def plain(text: object, most: int) -> str:
    """Words of somebody else's for a log: one line, nothing that a terminal would obey."""
    return "".join(ch if ch.isprintable() else "?" for ch in " ".join(str(text).split())[:most])
