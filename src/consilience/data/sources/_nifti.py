"""A small reader for NIfTI-1 volumes (.nii, .nii.gz): enough for prostate MRI, and nothing that runs code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import DataError
from ._files import read_bytes

_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


def read_nifti(path: Path) -> np.ndarray:
    """The volume as (slices, rows, columns), with the header's scale applied."""
    raw = read_bytes(path)
    order = {b"\x5c\x01\x00\x00": "<", b"\x00\x00\x01\x5c": ">"}.get(raw[:4])      # 348, the header's length
    if order is None or raw[344:348] not in (b"n+1\0",):
        raise DataError(f"The file {path} is not a NIfTI-1 volume in one file: its header must have 348 bytes and end with 'n+1'. "
                        f"Got {raw[344:348]!r} instead.")
    dim = np.frombuffer(raw, order + "i2", 8, 40)
    code = int(np.frombuffer(raw, order + "i2", 1, 70)[0])
    start, slope, shift = (float(v) for v in np.frombuffer(raw, order + "f4", 3, 108))
    if code not in _TYPES:
        raise DataError(f"The file {path} holds values of NIfTI type {code}, which is not read. Known: {sorted(_TYPES)}.")
    shape = tuple(int(n) for n in dim[1:int(dim[0]) + 1])
    if len(shape) < 3 or any(n != 1 for n in shape[3:]) or min(shape) < 1:
        raise DataError(f"The file {path} must hold one volume of three dimensions. Got {' × '.join(map(str, shape))} instead.")
    kind = np.dtype(order + _TYPES[code])
    count = int(np.prod(shape[:3], dtype=np.int64))
    if start < 348 or len(raw) < start + count * kind.itemsize:
        raise DataError(f"The file {path} is cut off: {' × '.join(map(str, shape[:3]))} values of {kind.itemsize} bytes need "
                        f"{int(start) + count * kind.itemsize} bytes (unpacked). Got {len(raw)} instead.")
    volume = np.frombuffer(raw, kind, count, int(start)).reshape(shape[2::-1])      # the first index varies fastest
    if (np.isfinite(slope) and slope not in (0.0, 1.0)) or (slope != 0.0 and shift != 0.0):
        return volume * slope + shift
    return volume
