"""Reading the common file formats, with errors that name the file and what was expected of it."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ...memory import map_file


def read_bytes(path: Path) -> bytes:
    """The contents of a file; of a .gz file, unpacked."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path, "rb") as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"The file {path} is cut off or damaged: it must be a complete gzip file ({error}). "
                        f"Get it again.") from None
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error}.") from None


def read_idx(path: Path, dimensions: int) -> Tensor:
    """An array of bytes in the idx format of MNIST, .gz or not."""
    raw = read_bytes(path)
    magic = bytes((0, 0, 8, dimensions))        # 8: unsigned bytes
    if raw[:4] != magic:
        raise DataError(f"The file {path} is not an idx file of bytes with {dimensions} dimensions: it must start with "
                        f"{magic.hex()}. Got {raw[:4].hex() or 'nothing'} instead.")
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(raw[4:start], ">u4")) if len(raw) >= start else ()
    expected = start + int(np.prod(shape, dtype=np.int64)) if shape else start
    if not shape or len(raw) != expected:
        says = " × ".join(map(str, shape)) or "nothing"
        raise DataError(f"The file {path} is cut off or damaged: its header says {says}, so {expected} bytes were expected "
                        f"(unpacked). Got {len(raw)} instead.")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy())


def read_records(path: Path, length: int, what: str) -> np.ndarray:
    """Bytes as rows of `length`."""
    try:
        size = path.stat().st_size
        if size == 0 or size % length:
            raise DataError(f"The file {path} is cut off or damaged: it must hold a whole number of {what} of {length} bytes. "
                            f"Got {size} bytes, which is {size / length:.2f} of them.")
        return np.fromfile(path, np.uint8).reshape(-1, length)
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error}.") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"The file {path} is not UTF-8 text: {error}.") from None
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error}.") from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file. Pickled objects are refused: they can run code."""
    try:
        held = np.load(path, allow_pickle=False)
        if isinstance(held, np.ndarray):
            raise DataError(f"The file {path} holds one array; x and y were expected. Save them together with np.savez(path, x=x, y=y), or "
                            "as x.npy and y.npy in a folder, and name the folder.")
        with held as archive:
            return {k: archive[k] for k in archive.files}
    except ValueError as error:
        if "pickle" in str(error).lower() and not _begins(path, b"PK", b"\x93NUMPY", b"\x80"):          # NumPy takes all else for a pickle
            raise DataError(f"The file {path} is not a readable .npz file: it begins like none. Was it cut off, or is it another kind of "
                            "file under that name?") from None
        if "pickle" in str(error).lower():
            raise DataError(f"The file {path} holds pickled Python objects, which are not read because they can run code. "
                            f"Save it again as plain arrays: np.savez(path, x=x, y=y).") from None
        raise DataError(f"The file {path} is not a readable .npz file: {error}.") from None
    except DataError:
        raise
    except Exception as error:      # zipfile and zlib raise many kinds for damaged archives
        raise DataError(f"The file {path} is not a readable .npz file: {error}.") from None


def _begins(path: Path, *marks: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(8).startswith(marks)


def map_arrays(folder: Path) -> dict[str, np.ndarray | Tensor]:
    """The .npy files of a folder by name: x mapped as a tensor, the others, which are small, read."""
    out: dict[str, np.ndarray | Tensor] = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"The file {path} is not a readable .npy file: {error}.") from None
        out[path.stem] = _mapped_tensor(path, mapped) if path.stem == "x" else np.array(mapped)
    return out


def _mapped_tensor(path: Path, array: np.memmap) -> Tensor:
    known = {"|u1": torch.uint8, "<f4": torch.float32, "<i8": torch.int64}
    if array.dtype.str not in known or not array.flags["C_CONTIGUOUS"]:
        raise DataError(f"The file {path} cannot be mapped: it must hold bytes, float32 or int64 in C order. Got {array.dtype} "
                        f"{'' if array.flags['C_CONTIGUOUS'] else 'in Fortran order '}instead.")
    return map_file(path, known[array.dtype.str], array.shape, array.offset)


def check_labels(labels: Tensor, classes: int, path: Path) -> Tensor:
    """Labels as int64, all from 0 to classes − 1."""
    labels = labels.long()
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        at = int(((labels < 0) | (labels >= classes)).nonzero()[0])
        raise DataError(f"The file {path} is mislabelled: labels must be 0 to {classes - 1}. "
                        f"Got {int(labels[at])} for sample {at}.")
    return labels


def check_lengths(images: Tensor, labels: Tensor, image_file: Path, label_file: Path) -> None:
    if len(images) != len(labels):
        raise DataError(f"{image_file.name} holds {len(images)} samples, but {label_file.name} holds {len(labels)} labels "
                        f"(both in {image_file.parent}). They must belong together.")
