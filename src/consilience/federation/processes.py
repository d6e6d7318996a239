"""Child processes that never outlive their parent: started with a log each, watched, and stopped in reverse order whatever happens.

Flower's processes start further ones, some in sessions of their own. All of them inherit a mark in their environment, by which what
is left after an orderly stop is found and ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ..errors import ConfigError, ConsilienceError
from ..runs.files import disk
from ..runs.lock import folder_lock

MARK = "CONSILIENCE_LAUNCH"
GRACE = 8.0                    # seconds to end in an orderly way before being killed
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]      # Ctrl-C raises by itself
TAIL = 12                      # lines of a log that an error shows


class LaunchError(ConsilienceError):
    """A process of the federation did not start, or ended when it should not have. The message ends with its last lines."""

    exit_code = 3


class Child:
    """One process and its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None = None) -> None:
        self.name, self.command, self.log = name, list(command), log
        with disk("make", log.parent):
            log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)        # a log may quote what stands in a site's files
        with disk("write", log), open(log, "ab") as file:
            self.start = file.tell()
            try:
                self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                                env=dict(env), cwd=cwd, start_new_session=True, preexec_fn=_die_with_parent)
            except OSError as error:
                raise LaunchError(f"{name} could not be started: {error}.") from None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """What this process wrote so far, in this start of it."""
        with open(self.log, "rb") as file:
            file.seek(self.start)
            return file.read().decode(errors="replace")

    def tail(self, lines: int = TAIL) -> str:
        last = [line for line in self.said().splitlines() if line.strip()][-lines:]
        return "\n".join(f"  {line}" for line in last) or "  (it wrote nothing)"

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float) -> None:
        """Until `ready` holds; an error with the log's end if the process ends first or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise LaunchError(f"{self.name} ended with code {self.process.returncode} before {what}. Its last lines ({self.log}):\n"
                                  f"{self.tail()}")
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.name} is not ready after {seconds:.0f} seconds, for want of this: {what}. Its last lines "
                                  f"({self.log}):\n{self.tail()}")
            time.sleep(0.1)

    def wait(self, seconds: float | None = None) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{self.name} did not end within {seconds:.0f} seconds. Its last lines ({self.log}):\n"
                              f"{self.tail()}") from None

    def signal(self, number: int) -> None:
        """To the process and all it started in its own group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def stop(self, grace: float = GRACE) -> None:
        """End it in an orderly way, then by force."""
        if self.running:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)

    def kill(self) -> None:
        """As a power failure would: at once, with no chance to say goodbye."""
        self.signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def only_one(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, so that no second server or site writes into it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; a {what} needs a folder of its own.")
    with disk("make", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder))
        except ConfigError:
            raise ConfigError(f"Another {what} runs in {str(folder)!r}. Stop it first, or give this one a folder of its own.") from None
        yield


class Processes:
    """A group of children. Leaving the `with` block, an error, Ctrl-C, SIGTERM and SIGHUP stop them all."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.mark = secrets.token_hex(16)
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), MARK: self.mark}
        self.children: list[Child] = []
        self._previous: dict[int, Any] = {}

    def start(self, name: str, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None,
              cwd: Path | None = None) -> Child:
        child = Child(name, command, log, {**self.env, **(env or {})}, cwd)
        self.children.append(child)
        return child

    def check(self) -> None:
        """An error if a child has ended that was to go on."""
        for child in self.children:
            if not child.running:
                raise LaunchError(f"{child.name} ended with code {child.process.returncode}. Its last lines ({child.log}):\n{child.tail()}")

    def stop(self) -> None:
        """Last started, first stopped; then whatever carries our mark."""
        running = [c for c in reversed(self.children) if c.running]
        for child in running:
            child.signal(signal.SIGTERM)
        for child in running:
            child.stop()
        self.children.clear()
        end_marked(self.mark)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, _leave) for number in STOPS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            for number, before in self._previous.items():
                signal.signal(number, before)


def marked(mark: str) -> list[int]:
    """Processes that inherited a mark. Seen on Linux; elsewhere Flower's own watch over parents has to do."""
    out = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ValueError):
            if wanted in entry.read_bytes().split(b"\0"):
                out.append(int(entry.parent.name))
    return [pid for pid in out if pid != os.getpid()]


def end_marked(mark: str) -> None:
    """End by force whatever carries a mark."""
    for _ in range(20):
        left = marked(mark)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _load_prctl() -> Callable[[], None]:
    """On Linux the kernel ends a child whose parent was killed; nothing else can."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM, 0, 0, 0) and None


_die_with_parent = _load_prctl()
