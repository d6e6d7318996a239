"""Whether a source's files are there, whole, and the published ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DataError
from . import directory
from .dataset import Dataset
from .load import fingerprint_of
from .sources import Source

Progress = Callable[[int], None]        # called with the number of bytes read since the last call


def md5_of(path: Path, progress: Progress | None = None) -> str:
    """The MD5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                if progress:
                    progress(len(piece))
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error}.") from None
    return digest.hexdigest()


def where(source: Source, data_dir: str | Path | None = None) -> dict[str, Any]:
    """Where a source was looked for and what was found there; reads no samples."""
    if source.embedded or source.needs_path:
        return {"found": True if source.embedded else None, "folder": None, "looked_in": [], "files": []}
    found = directory.locate(source, data_dir)
    files = [{"file": w.path, "optional": w.optional, "path": str(p) if p else None,
              "size": p.stat().st_size if p and p.is_file() else None}
             for w, p in (source.sources_of(found) if found else [(w, None) for w in source.files])]
    return {"found": found is not None, "folder": str(found) if found else None,
            "looked_in": [str(f) for f in directory.candidates(source, data_dir)], "files": files}


def bytes_to_check(source: Source, data_dir: str | Path | None = None) -> int:
    """How much `check_files` will read."""
    found = directory.locate(source, data_dir) if source.folders else None
    return sum(p.stat().st_size for w, p in source.sources_of(found) if p and p.is_file() and w.md5) if found else 0


def check_files(source: Source, data_dir: str | Path | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """For every declared file: its size and checksum beside the published ones, and a verdict.

    "published": the checksum is a known one. "differs": it is not (a part, another version, or damage). "present": no checksum
    is known. "absent": optional and not there.
    """
    if not source.folders:
        return []
    folder = directory.find(source, data_dir)
    rows = []
    for wanted, path in source.sources_of(folder):
        row: dict[str, Any] = {"file": wanted.path, "path": str(path) if path else None, "size": None, "expected_size": wanted.size,
                               "md5": None, "expected_md5": list(wanted.md5), "verdict": "absent"}
        if path is not None:
            row["verdict"] = "present"
            if path.is_file():
                row["size"] = path.stat().st_size
                if wanted.md5 and path.name == Path(wanted.path).name:      # an unpacked copy has no published checksum
                    row["md5"] = md5_of(path, progress)
                    row["verdict"] = "published" if row["md5"] in wanted.md5 else "differs"
        rows.append(row)
    return rows


def contents(dataset: Dataset) -> dict[str, Any]:
    """Counts of a data set that was read, ready for JSON."""
    test = dataset.official_test
    by_class = dataset.y.bincount(minlength=dataset.classes).tolist() if dataset.y.dim() == 1 else None
    names = dataset.class_names or tuple(str(c) for c in range(dataset.classes))
    groups = {}
    for group, values in dataset.groups.items():
        sizes = values[values >= 0].unique(return_counts=True)[1].tolist() or [0]
        groups[group] = {"values": len(sizes), "smallest": min(sizes), "largest": max(sizes)}
    return {"samples": len(dataset.y), "test_samples": len(test), "shape": list(dataset.x.shape[1:]),
            "dtype": str(dataset.x.dtype).removeprefix("torch."), "classes": dataset.classes,
            "by_class": dict(zip(names, by_class)) if by_class and len(set(names)) == len(by_class) else by_class,
            "groups": groups, "published_parts": dataset.roles is not None, "task": dataset.task,
            "megabytes": round(sum(t.numel() * t.element_size() for t in (dataset.x, dataset.y)) / 1e6, 1),
            "fingerprint": fingerprint_of(dataset)}
