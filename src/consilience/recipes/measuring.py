"""Measures that cells are scored by, taken of a run as soon as it has ended: its tensors may be gone when the command ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConsilienceError
from ..metrics.registry import make_measures
from ..metrics.subject import Halfway, OutOfTime
from ..runs.files import read_json, write_json
from ..runs.measure import measure
from .folders import HALFWAY, MEASURES, known_measures, opened

SHARE = 0.1                    # of the time allowed is kept for measures at most: training is what the time is for


class _HalfwayFile(Halfway):
    """What a measure has found so far, in a file of the run's folder."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file, self.text = folder / HALFWAY, text
        super().__init__(_read(self.file).get(text, {}))

    def save(self) -> None:
        write_json(self.file, {**_read(self.file), self.text: dict(self)})

    def done(self) -> None:
        others = {text: found for text, found in _read(self.file).items() if text != self.text}
        if others:
            write_json(self.file, others)
        else:
            self.file.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """A damaged file is begun anew."""
    try:
        return read_json(file) if file.is_file() else {}
    except ConsilienceError:
        return {}


@dataclass(frozen=True)
class TakeMeasures:
    """Follows a run in the process that ran it (`runs.many.Then`). One measure that fails stops no other, and the run stays as it is."""

    texts: tuple[str, ...]
    allowed: float = 0.0                       # seconds the command was given

    def reserve(self, folder: str) -> float:
        return min(self.allowed * SHARE, sum(_seconds(Path(folder), text) or 0.0 for text in self.texts))

    def __call__(self, folder: str, note: Callable[[str], None], until: float | None) -> dict[str, str]:
        """Why measures could not be taken, by their text; those for which there was no time are left for another time."""
        failed: dict[str, str] = {}
        try:
            take_measures(Path(folder), self.texts, failed, note, until)
        except Exception as error:             # the run could not be opened
            reason = str(error) if isinstance(error, ConsilienceError) else f"{type(error).__name__}: {error}"
            known = known_measures(Path(folder))
            failed.update({text: reason for text in self.texts if text not in known})
        return failed


def missing_measures(folder: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """Those not taken yet, each once."""
    known = known_measures(folder)
    return tuple(t for t in dict.fromkeys(texts) if t not in known)


def take_measures(folder: Path, texts: Sequence[str], failed: dict[str, str], note: Callable[[str], None] = lambda text: None,
                  until: float | None = None) -> None:
    """Measures of a finished run that are not in its folder yet; each is written down as soon as it is there."""
    due = [t for t in missing_measures(folder, texts) if _has_time(folder, t, until)]
    if not due:
        return

    def tell(name: str, what: str, done: int, of: int) -> None:
        note(f"{name}: {what} {done} of {of}" if what else name)
    note("reading the run")
    with opened(folder) as run:
        for text in due:
            halfway, start = _HalfwayFile(folder, text), time.time()
            try:
                [entry] = measure(run, [text], keep=lambda path, entries: None, until=until, halfway=halfway, tell=tell).values()
            except OutOfTime:
                continue
            except Exception as error:
                failed[text] = str(error) if isinstance(error, ConsilienceError) else f"{type(error).__name__}: {error}"
                continue
            write_json(folder / MEASURES, {**known_measures(folder), text: {"round": entry["round"], "result": entry["result"],
                                                                            "seconds": round(time.time() - start, 1)}})
            halfway.done()


def _has_time(folder: Path, text: str, until: float | None) -> bool:
    """Whether a measure can end in time, as far as is known, or at least go on from where it had to stop."""
    if until is None or make_measures([text])[0].resumable:
        return until is None or time.time() < until
    return time.time() + (_seconds(folder, text) or 0.0) < until


def _seconds(folder: Path, text: str) -> float | None:
    """The longest time that this measure has taken of the runs beside this one."""
    taken = [e["seconds"] for path in folder.parent.glob(f"*/{MEASURES}") if "seconds" in (e := known_measures(path.parent).get(text, {}))]
    return max(taken, default=None)


__all__ = ["TakeMeasures", "missing_measures", "take_measures"]
