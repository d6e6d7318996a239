"""Writing files so that a power cut leaves either the old or the new one, and reading tensors without pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..engines.store import sync_folder
from ..errors import ConsilienceError, DataError


class DiskError(ConsilienceError):
    """The disk refused: full, read-only, or not permitted. What was written before stays."""

    exit_code = 4


@contextlib.contextmanager
def disk(what: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a message a user can act on."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"Cannot {what} {str(path)!r}: {error.strerror or error}. What was written before is intact; "
                        "free some space or choose another folder, then run the same command again.") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically. What could not be written whole takes no room: the disk may be full."""
    with disk("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        try:
            with open(draft, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            _drop(draft)
            raise
        sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder that is there whole or not at all. Gives a draft to write into, which takes the place of what was there before.

    For one writer at a time: drafts beside it are of processes that were killed, and go.
    """
    drop_drafts(folder.parent)
    draft = folder.with_name(f".draft-{folder.name}")
    try:
        yield draft
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(draft, folder)
    except BaseException:
        _drop(draft)
        raise
    sync_folder(folder.parent)


def drop_drafts(*folders: Path) -> None:
    """Remove what killed processes left half-written. Nobody else may be writing there."""
    for folder in folders:
        for draft in (*folder.glob(".*.draft"), *folder.glob(".draft-*")):
            _drop(draft)


def _drop(draft: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, default=list, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"There is no file {str(path)!r}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"The file {str(path)!r} is damaged: {error}.") from None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file, keys sorted and no metadata, so that equal tensors give equal bytes. Returns its hash."""
    plain: dict[str, Tensor] = {}
    held: set[int] = set()
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        plain[key] = tensor.clone() if place in held else tensor      # clients that were never trained share the initial values
        held.add(place)
    content = save(plain)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, checking its hash where one is known."""
    try:
        if sha256 is not None and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise DataError(f"The file {str(path)!r} is damaged: its contents do not match the recorded hash.")
        return load_file(str(path))
    except FileNotFoundError:
        raise DataError(f"There is no file {str(path)!r}.") from None
    except SafetensorError as error:
        raise DataError(f"The file {str(path)!r} is damaged: {error}.") from None
