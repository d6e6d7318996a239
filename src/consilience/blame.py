"""Errors in a user's own part, model or factory: which line of which file, in place of a traceback through ours."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

VARIABLE = "CONSILIENCE_TRACEBACK"
_OURS = str(Path(__file__).parent) + os.sep
_THEIRS = tuple({str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def placed(error: Exception, place: str | None = None) -> Exception:
    """An error of another process, with the place it was found at there: its frames do not travel."""
    error.__dict__["_place"] = place
    return error


def place_in_users_code(error: BaseException) -> str | None:
    """'mine.py, line 12, in loss: return v.x + 1', where our code called the user's and that failed; None where it did not."""
    if "_place" in error.__dict__:
        found: str | None = error.__dict__["_place"]
        return found
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename.startswith(_OURS)), len(frames))
    for frame in reversed(frames[first:]):
        if Path(frame.filename).is_file() and not frame.filename.startswith((_OURS, *_THEIRS)) and "site-packages" not in frame.filename:
            return f"{shown(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return None


def blame(error: BaseException) -> str | None:
    """What a user is told of an error in code of her own; None for an error that is ours, or where she wants the traceback."""
    place = None if os.environ.get(VARIABLE) else place_in_users_code(error)
    return place and f"{type(error).__name__}: {error}\n  {place}\nThis is in code of your own. {VARIABLE}=1 shows the whole traceback."


def shown(name: str) -> str:
    """From where the user stands, if that is shorter."""
    try:
        return min(os.path.relpath(name), name, key=len)
    except ValueError:                                   # another drive
        return name
