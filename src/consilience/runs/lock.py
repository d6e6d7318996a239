"""A lock on a folder that dies with its process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from .files import disk


def make_folder(path: Path) -> None:
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{str(place)!r} is a file{'' if place == path else f', so {str(path)!r} cannot be made'}. "
                              "Choose another folder with --out.")
    with disk("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the folder for this process. The operating system lets go of the lock when the process ends, however it ends."""
    make_folder(path)
    with disk("lock", path):
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError:
            raise ConfigError(f"Another process is writing to {str(path)!r}. "
                              "Wait for it, stop it, or choose another --out.") from None
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    if os.name == "nt":
        import msvcrt
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
