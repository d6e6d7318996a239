"""Fetching a source's files, for people who are online."""

from __future__ import annotations

import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..errors import DataError
from . import directory
from .sources import Download, Source
from .verify import md5_of

Progress = Callable[[str, int, int], None]      # (what is done, bytes so far, bytes in all or 0 where nobody counts)


def download(source: Source, data_dir: str | Path | None = None, progress: Progress | None = None) -> list[Path]:
    """Fetch, check and unpack all files of a source below the data directory; what is already there is kept."""
    if not source.downloads:
        hint = directory.how_to_get(source) or "It needs no files."
        raise DataError(f"Data set {source.name!r} has no download step. {hint}")
    base = directory.data_directory(data_dir)
    base.mkdir(parents=True, exist_ok=True)
    return [fetch(item, base, progress) for item in source.downloads]


def fetch(item: Download, base: Path, progress: Progress | None = None) -> Path:
    """One file, unpacked where it is an archive; one that is there already is fetched again if it is not the published one."""
    tell = progress or (lambda what, done, total: None)
    name = Path(urllib.request.url2pathname(item.url)).name
    packed = name.endswith((".tar.gz", ".tgz", ".zip"))
    target = base / item.to / name if packed else base / item.to
    if not target.is_file() or not _is_published(target, item, tell):
        _transfer(item, target, tell)
    if packed:
        tell(f"unpacking {name}", 0, 0)
        _unpack(target, base / item.to)
    return target


def _is_published(file: Path, item: Download, tell: Progress) -> bool:
    tell(f"checking {file.name}", 0, 0)
    return not item.md5 or md5_of(file) == item.md5


def _transfer(item: Download, target: Path, tell: Progress) -> None:
    """To a temporary name first, so that a broken transfer never looks like a data file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    tell(target.name, 0, 0)
    try:
        with urllib.request.urlopen(item.url, timeout=60) as reply, partial.open("wb") as file:
            total = int(reply.headers.get("Content-Length") or 0)
            done = 0
            while piece := reply.read(1 << 18):
                file.write(piece)
                done += len(piece)
                tell(target.name, done, total)
        if total and done != total:
            raise DataError(f"{item.url} broke off after {done} of {total} bytes. Try again.")
        tell(f"checking {target.name}", 0, 0)
        found = md5_of(partial) if item.md5 else ""
        if found != item.md5:
            raise DataError(f"{item.url} arrived damaged or is another version: its MD5 must be {item.md5}. Got {found} instead.")
        partial.replace(target)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{item.url} cannot be fetched: {reason}. Without a connection, get the file elsewhere and put it at "
                        f"{target}.") from None
    except OSError as error:
        raise DataError(f"The file {target} cannot be written: {error}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Members stay below the folder: the tar filter and zipfile both refuse to leave it."""
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(folder)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"The archive {archive} cannot be unpacked: {error}. Delete it and download it again.") from None
