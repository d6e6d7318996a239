"""Start a run on a running federation and follow its records, which the server writes in the form of a simulation's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..runs.files import read_json
from ..runs.folder import read_records
from .commands import SuperLink
from .launch import Launcher
from .processes import LaunchError

LOOK = 0.5                     # seconds between two looks at the records
_STOPS = re.compile(r"The federation stops: (.*)")
_NOTE = re.compile(r"(?:WARNING|ERROR)\s*:\s+(.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
Record = dict[str, Any]


def run_and_follow(launcher: Launcher, link: SuperLink, app: Path, folder: Path, overrides: Mapping[str, Any] | None = None, *,
                   hear: Callable[[Record], None] = lambda record: None, note: Callable[[str], None] = lambda text: None,
                   name: str = "run") -> dict[str, Any]:
    """A run's document when it is done. A finished one in that folder is only read; one that stopped early is an error with its reason.

    `hear` is told every record as it is written, `note` every warning of the server.
    """
    folder = folder.absolute()
    heard, noted = 0, 0
    if not (folder / "done").is_file():
        run = launcher.flwr_run(app, link, {**(overrides or {}), "folder": str(folder)}, name)
        try:
            while not (folder / "done").is_file():
                heard = _tell(folder, heard, hear)
                noted = _pass_on(run.follow.said(), noted, note)
                if not run.running:
                    _tell(folder, heard, hear)
                    if not (folder / "done").is_file():
                        raise LaunchError(_reason(run.follow.said(), run.status(), run.follow.log))
                launcher.check()
                time.sleep(LOOK)
        except KeyboardInterrupt:
            run.stop()
            raise
    _tell(folder, heard, hear)
    return read_run(folder)


def read_run(folder: Path) -> dict[str, Any]:
    """What a server's folder says of a finished run."""
    if not (folder / "done").is_file():
        raise DataError(f"The run in {str(folder)!r} is not finished.")
    newest = max((folder / "checkpoints").glob("round-*"))
    sizes = {site["name"]: site["sizes"] for site in read_json(newest / "state.json")["sites"].values()}
    return {"records": read_records(folder / "records.jsonl"), "done": read_json(folder / "done"), "sizes": sizes,
            **read_json(folder / "config.json")}


def _tell(folder: Path, heard: int, hear: Callable[[Record], None]) -> int:
    """Pass on records that are new. A half-written last line waits."""
    path = folder / "records.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    for line in lines[heard:]:
        if not line.endswith("\n"):
            break
        hear(json.loads(line))
        heard += 1
    return min(heard, len(lines))


def _pass_on(said: str, noted: int, note: Callable[[str], None]) -> int:
    found = _NOTE.findall(_COLOUR.sub("", said))
    for text in found[noted:]:
        note(text)
    return len(found)


def _reason(said: str, status: str, log: Path) -> str:
    plain = _COLOUR.sub("", said)
    stops = _STOPS.findall(plain)
    if stops:
        return f"The federation stopped: {stops[-1]}"
    last = "\n".join(f"  {line}" for line in plain.splitlines()[-12:] if line.strip())
    return f"The run ended early ({status}). The server's last lines ({log}):\n{last}"
