"""A real browser to open pages in, driven over a pipe (DevTools protocol): what is asked for is waited for, however slow the machine."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1100,900", "--remote-debugging-pipe"]
# The browser reads commands from descriptor 3 and answers on 4. Copies first: either number may be in use by the pair handed over.
EXEC = """
import os, sys
reads, writes = (os.dup(int(n)) for n in sys.argv[1:3])
reads, writes = (os.dup(n) if n in (3, 4) else n for n in (reads, writes))
os.dup2(reads, 3), os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 240.0        # seconds until a browser that says nothing counts as hung; only a failing test ever waits this long


class Page:
    """A page in the browser that has loaded and run its own script."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers, self._unread = itertools.count(1), b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self._call("Page.enable", **self._session)

    def open(self, path: Path) -> None:
        self._call("Page.navigate", url=path.resolve().as_uri(), **self._session)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """What the script's last expression comes to; a promise is waited for. The page's policy for scripts stays as it is."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, **self._session)
        if "exceptionDetails" in answer:
            told = answer["exceptionDetails"]
            raise AssertionError(told.get("exception", {}).get("description") or told["text"])
        return answer["result"].get("value")

    def close(self) -> None:
        self._send("Browser.close")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, **params)
        while (answer := self._message()).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _send(self, method: str, sessionId: str | None = None, **params: Any) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": sessionId} if sessionId else {})}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return number

    def _message(self) -> dict[str, Any]:
        """The next message: JSON that ends with a zero byte."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE:.0f} s"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser ended"
            self._unread += more
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def opened(path: Path, *flags: str) -> Iterator[Page]:
    """The page at `path` in a browser of its own."""
    browser_reads, commands = os.pipe()
    answers, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, open(Path(profile) / "stderr", "w+") as said:
        process = subprocess.Popen([sys.executable, "-c", EXEC, str(browser_reads), str(browser_writes), str(BROWSER), *FLAGS,
                                    f"--user-data-dir={profile}", *flags],
                                   pass_fds=(browser_reads, browser_writes), stdout=subprocess.DEVNULL, stderr=said)
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            page = Page(commands, answers)
            page.open(path)
            yield page
            page.close()
            process.wait(60)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            said.seek(0)
            error.add_note(f"the browser's last words: {said.read()[-2000:]}")
            raise
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
