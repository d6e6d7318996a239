"""What a site's operator sees while the site runs: that it was accepted, each round, and every refusal."""

from __future__ import annotations

import re
import time

from rich.markup import escape

from ..federation.approval import Approvals
from ..federation.launch import Launcher, RunningSite
from .output import err

_ROUND = re.compile(r"\[RUN (\d+)(?:, ROUND (\S+))?\]\s*\n(?:.*\n)?.*Receiving: (\S+) message")
_REFUSED = re.compile(r"REFUSED (run \d+: .*)")
_RAISED = re.compile(r"The app raised an exception\.[\s\S]*?\n(\w*(?:Error|Exception)[^\n]*)")


def watch(launcher: Launcher, running: RunningSite, approvals: Approvals) -> None:
    """Print what happens until Ctrl-C, or an error when a process ends."""
    console = err()
    launcher.await_site(running, forever=True)
    console.print(f"The server {running.site.superlink.address} accepted this site as number {running.site.number}. Ctrl-C stops it; "
                  "its state is kept.", soft_wrap=True)
    console.print(f"Logs: {running.node.log}, {running.starter.log}", soft_wrap=True)
    seen = {"node": 0, "app": 0}
    while True:
        launcher.check()
        said = running.node.said()
        for found in _ROUND.finditer(said, seen["node"]):
            console.print(f"run {found[1]}: {found[3]}{f', round {found[2]}' if found[2] else ''}")
            seen["node"] = found.end()
        said = running.starter.said()
        for found in sorted([*_REFUSED.finditer(said, seen["app"]), *_RAISED.finditer(said, seen["app"])], key=lambda m: m.start()):
            word = "Refused" if found.re is _REFUSED else "Failed"
            console.print(f"[red]{word}[/red] {escape(found[1])}", soft_wrap=True)
            if word == "Refused":
                console.print(f"Its bundle lies unopened in {approvals.refused}; to approve it: consilience federation approve "
                              f"{approvals.store} HASH", soft_wrap=True)
            seen["app"] = found.end()
        time.sleep(1)
