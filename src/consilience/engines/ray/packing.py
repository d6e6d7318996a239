"""Values on their way through Ray's object store: tensors as arrays that all processes of a machine read in place.

Ray keeps arrays apart from a pickle and maps them, but would copy tensors; so the tensors are taken out and travel as arrays.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor, nn

from ...loading import LOADED


class Packed(NamedTuple):
    """A pickle without its tensors, and their bytes."""

    content: bytes
    arrays: list[np.ndarray]


class _Place(NamedTuple):
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None                             # None: contiguous
    trains: bool | None                                        # of a parameter; None: it is none


class _Pickler(cloudpickle.CloudPickler):
    """Takes the tensors out. Classes of the user's own script travel by value, as Ray has it, and so do those of files of the user's own,
    which other processes have not run and other machines may not have.
    """

    def __init__(self, file: io.BytesIO) -> None:
        for name in LOADED.keys() & sys.modules.keys():
            cloudpickle.register_pickle_by_value(sys.modules[name])
        super().__init__(file)
        self.arrays: list[np.ndarray] = []
        self._known: dict[int, _Place] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = self._take(value)
        return self._known[id(value)]

    def _take(self, tensor: Tensor) -> _Place:
        # A convolution looks at strides to choose its kernel, so channels_last must arrive as it left, one channel included.
        keep = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        here = tensor.detach().cpu()
        flat = here.permute(0, 2, 3, 1).reshape(-1) if keep else here.contiguous().view(-1)
        self.arrays.append(flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8))
        return _Place(len(self.arrays) - 1, tensor.dtype, tuple(tensor.shape), tensor.stride() if keep else None,
                      tensor.requires_grad if isinstance(tensor, nn.Parameter) else None)


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed, copy: bool) -> None:
        super().__init__(io.BytesIO(packed.content))
        self.arrays, self.copy = packed.arrays, copy
        self._known: dict[int, Tensor] = {}

    def persistent_load(self, place: _Place) -> Tensor:
        if place.number not in self._known:
            self._known[place.number] = self._tensor(place)
        return self._known[place.number]

    def _tensor(self, place: _Place) -> Tensor:
        array = self.arrays[place.number]
        if not len(array):
            return torch.zeros(place.shape, dtype=place.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                    # of memory that must not be written to: states are replaced, never written
            flat = torch.from_numpy(array)
        if self.copy or place.trains is not None or flat.data_ptr() % place.dtype.itemsize:
            flat = flat.clone()
        flat = flat.view(place.dtype)
        tensor = flat.view(place.shape) if place.stride is None else flat.as_strided(place.shape, place.stride)
        return tensor if place.trains is None else nn.Parameter(tensor, requires_grad=place.trains)


def pack(value: Any) -> Packed:
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return Packed(out.getvalue(), pickler.arrays)


def unpack(packed: Packed, copy: bool) -> Any:
    """The value. Without a copy its tensors are the store's memory, which stays as long as they do."""
    return _Unpickler(packed, copy).load()
