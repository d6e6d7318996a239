"""The runs of a comparison on a Ray cluster: each on one core, or with one GPU, of some machine.

A folder that the machine can see too is used as it is. Where it cannot, the run is made in a folder of that machine's own, which travels
back whole when the run has ended.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConsilienceError
from .files import disk, write_bytes
from .lock import folder_lock
from .many import DIED, Outcome, _attempt

if TYPE_CHECKING:
    from .many import Job

Ended = tuple[Outcome, list[str]]


def runs_on_cluster(jobs: Sequence[Job], *, at_once: int | None, again: bool, until: float | None,
                    heard: Callable[[int, int], None]) -> Iterator[tuple[int, Ended]]:
    """(place, outcome and warnings) of every job, as they end."""
    from ..engines.ray import Cluster, Lost, each_job
    for job in jobs:
        if job.config.run.engine == "ray" or job.config.run.devices:
            asked = "engine=ray" if job.config.run.engine == "ray" else f"devices={job.config.run.devices}"
            raise ConfigError(f"On a Ray cluster each run has a core or a GPU of its own, so {asked} would share out what is shared out "
                              "already. Leave one of the two out.")
    run = jobs[0].config.run
    there = Cluster.connect(run.ray)
    try:
        plan = there.plan(len(jobs), gpus=None if run.device == "auto" else run.device != "cpu", workers=at_once)
        with _marked(jobs) as mark:
            calls = [(job.config.flat() | {"ray": None}, str(Path(job.folder).absolute()) if job.folder else None, again, until, mark)
                     for job in jobs]
            for place, result in each_job(there, attempt_there, calls, on_gpu=plan.on_gpu, at_once=plan.workers, heard=heard):
                if isinstance(result, Lost):
                    yield place, (DIED, [])
                    continue
                outcome, warnings, files = result
                folder = jobs[place].folder
                if files is not None and folder is not None:
                    try:
                        _put(Path(folder), files)
                    except ConsilienceError as error:
                        outcome = str(error)
                yield place, (outcome, warnings)
    finally:
        there.close()


@contextmanager
def _marked(jobs: Sequence[Job]) -> Iterator[str]:
    """A file with a random name in the folder of all runs: a machine that sees it sees the folder."""
    folders = {Path(job.folder).parent for job in jobs if job.folder}
    mark = f".ray-{uuid.uuid4().hex}"
    for folder in folders:
        write_bytes(folder / mark, b"")
    try:
        yield mark
    finally:
        for folder in folders:
            (folder / mark).unlink(missing_ok=True)


def attempt_there(flat: dict[str, Any], folder: str | None, again: bool, until: float | None, mark: str,
                  heard: Callable[[int], None]) -> tuple[Outcome, list[str], dict[str, bytes] | None]:
    """One run, on whichever machine this is; with its files where the folder asked for is not there."""
    if folder is None or (Path(folder).parent / mark).is_file():
        return (*_attempt(flat, folder, again, heard, until), None)
    own = Path(tempfile.mkdtemp(prefix="consilience-run-"))
    try:
        outcome, warnings = _attempt(flat, str(own), again, heard, until)
        if isinstance(outcome, str):
            return outcome, warnings, None
        outcome["measured"]["folder"] = folder
        files = [p for p in sorted(own.rglob("*")) if p.is_file() and p.name != ".lock"]
        return outcome, warnings, {str(p.relative_to(own)): p.read_bytes() for p in files}
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _put(folder: Path, files: dict[str, bytes]) -> None:
    """A run's files as they came; `done` last, so that half a run never looks finished."""
    with folder_lock(folder):
        old = [p for p in folder.iterdir() if p.name != ".lock"]
        if old and not (folder / "config.json").is_file():
            raise ConfigError(f"The folder {str(folder)!r} holds files, but no run of ours. Choose an empty folder with --out.")
        with disk("empty", folder):
            for path in sorted(old, key=lambda p: p.name != "done"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in sorted(files, key=lambda name: name == "done"):
            write_bytes(folder / name, files[name])
