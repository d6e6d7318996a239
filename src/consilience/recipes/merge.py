"""Bring runs together that were made on several machines: folders, or archives of them."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, ConsilienceError
from ..report.gather import find_runs, read_run
from ..runs.files import DiskError, disk


def merge_runs(sources: Sequence[str | Path], runs: Path) -> list[str]:
    """Copy every run found in the sources into `runs`, unless the one there has come further; returns the names of those copied."""
    copied: list[str] = []
    for source in map(Path, sources):
        if source.is_dir():
            copied += _copy(source, runs)
        elif source.is_file():
            with tempfile.TemporaryDirectory() as place:
                _unpack(source, Path(place))
                if not any(Path(place).rglob("config.json")):
                    raise ConfigError(f"The archive {str(source)!r} holds no run: there is no config.json in it.")
                copied += _copy(Path(place), runs)
        else:
            raise ConfigError(f"There is no folder or archive {str(source)!r} to take runs from.")
    return copied


def _unpack(archive: Path, into: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(into)                              # zipfile itself keeps names inside the folder
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(into, filter="data")                  # no links out of the folder, no devices, no absolute names
                _check_end(tar)
    except OSError as error:
        if error.errno is not None:                                  # the disk's fault, and not the archive's
            raise DiskError(f"Cannot unpack {str(archive)!r} into {tempfile.gettempdir()!r}: {error.strerror}. Free some space there, or "
                            "name another place in the variable TMPDIR.") from error
        raise _damaged(archive, error) from None
    except Exception as error:               # each packer has errors of its own for damage, for passwords and for what it does not know
        raise _damaged(archive, error) from None


def _check_end(tar: tarfile.TarFile) -> None:
    """tarfile takes what it cannot read in the middle for the end, and a file that ends between two of those packed, too; then it leaves
    out runs without a word. A whole archive ends with zeros. Reading on to the true end compares the checksum of what is packed."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    follows = tar.fileobj.read(tarfile.BLOCKSIZE)
    if not follows:
        raise tarfile.TarError("it is cut off behind its first files")
    if follows.strip(b"\0"):
        raise tarfile.TarError("what follows its first files is damaged")
    while tar.fileobj.read(2**20):
        pass


def _damaged(archive: Path, error: Exception) -> ConfigError:
    why = "it is no .tar, .tar.gz or .zip file, or is damaged" if isinstance(error, tarfile.ReadError) and "\n" in str(error) else error
    return ConfigError(f"The archive {str(archive)!r} cannot be unpacked: {why}.")


def _copy(folder: Path, runs: Path) -> list[str]:
    out = []
    for found in find_runs([folder]):
        target = runs / found.name
        if found.resolve() == target.resolve() or _progress(found) <= _progress(target):
            continue
        _put(found, target)
        out.append(found.name)
    return out


def _put(found: Path, target: Path) -> None:
    """A copy that is there whole or not at all; until it is, what was there before stays."""
    with disk("write", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".merging-", dir=target.parent) as place:      # hidden, so that nobody takes it for runs
            new, old = Path(place) / "new", Path(place) / "old"
            shutil.copytree(found, new)
            if target.is_dir():
                target.rename(old)
            try:
                new.rename(target)
            except BaseException:
                if old.is_dir():
                    old.rename(target)
                raise


def _progress(folder: Path) -> tuple[bool, int, int]:
    """Finished or not, rounds made, and whether it can go on from a checkpoint."""
    try:
        run = read_run(folder)
    except (ConsilienceError, OSError):
        return False, -1, 0
    tensors = len(list(folder.glob("checkpoints/*/state.safetensors")))
    return run.stopped is not None, run.records[-1]["round"] if run.records else 0, min(tensors, 1)
