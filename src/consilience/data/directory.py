"""Where data sets lie: an explicit directory, else CONSILIENCE_DATA, else a folder of the user's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError

if TYPE_CHECKING:
    from .sources.base import Source

VARIABLE = "CONSILIENCE_DATA"


def user_directory() -> Path:
    """The default of this platform, for people who set nothing."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    return base / "consilience" / "data"


def data_directory(directory: str | Path | None = None) -> Path:
    """The data directory in force. An explicit one that does not exist is an error; a default need not exist."""
    if directory:
        chosen = Path(directory).expanduser()
        if not chosen.is_dir():
            raise DataError(f"The data directory {str(chosen)!r} does not exist. Create it or name another.")
        return chosen
    if os.environ.get(VARIABLE):
        chosen = Path(os.environ[VARIABLE]).expanduser()
        if not chosen.is_dir():
            raise DataError(f"{VARIABLE} names the directory {str(chosen)!r}, which does not exist. "
                            f"Create it, or set {VARIABLE} to another.")
        return chosen
    return user_directory()


def candidates(source: Source | type[Source], directory: str | Path | None = None) -> list[Path]:
    """Every folder that may hold the source's files, in the order they are tried."""
    base = data_directory(directory)
    tried = [base / f for f in source.folders]
    if base.name.lower() in {Path(f).name.lower() for f in source.folders}:     # the data set's own folder was named
        tried.insert(0, base)
    return tried + [Path(f) for f in source.system_folders]


def missing_from(source: Source | type[Source], folder: Path) -> list[str]:
    """The required files that a folder lacks."""
    return [w.path for w in source.files if not w.optional and w.locate(folder) is None]


def locate(source: Source | type[Source], directory: str | Path | None = None) -> Path | None:
    """The first folder with all required files, or None. Where all are optional, as of formats to choose from, one must be there."""
    return next((f for f in candidates(source, directory) if f.is_dir() and not missing_from(source, f)
                 and (not source.files or any(w.locate(f) for w in source.files))), None)


def find(source: Source | type[Source], directory: str | Path | None = None) -> Path:
    """The folder with the source's files, or an error that says what is missing, where it was looked for, how to get it."""
    found = locate(source, directory)
    if found is not None:
        return found
    tried = candidates(source, directory)
    # The folder that has most of the files is the one the user meant.
    present = [f for f in tried if f.is_dir()]
    nearest = min(present, key=lambda f: len(missing_from(source, f))) if present else None
    lacking = missing_from(source, nearest) if nearest else [w.path for w in source.files if not w.optional]
    first, more = repr(lacking[0]) if lacking else "its folder", len(lacking) - 1
    what = f"{first} and {more} more were" if more > 0 else f"{first} was"
    where = "\n".join(f"  {f}" + ("" if f.is_dir() else "   (no such folder)") for f in tried)
    raise DataError(f"Data set {source.name!r} is not here: {what} not found. Looked in\n{where}\n"
                    f"{how_to_get(source)}\nTo look elsewhere, pass --data-dir or set {VARIABLE}.")


def how_to_get(source: Source | type[Source]) -> str:
    """One or two sentences on getting the files."""
    text = f"How to get it: {source.how_to_get}" if source.how_to_get else ""
    if source.downloads:
        text += f"{' Or, o' if text else 'O'}nline, run: consilience data download {source.name}"
    return text
