"""What a site's operator sees while the site runs: that it was accepted, each round, and every refusal."""

from __future__ import annotations

import re
import time

from rich.markup import escape

from ..federation.approval import Approvals
from ..federation.launch import Launcher, RunningSite
from ..federation.processes import LaunchError
from .output import err

HINT = 30.0               # seconds without an answer after which a hint is due
WORDS = {"query": "asked before training", "train": "training", "evaluate": "scoring"}
_ROUND = re.compile(r"\[RUN (\d+)(?:, ROUND (\S+))?\]\s*\n(?:.*\n)?.*Receiving: (\S+) message")
_REFUSED = re.compile(r"REFUSED (run \d+: .*)")
_CANNOT = re.compile(r"(?:This site cannot take part|Site \d+ cannot answer \w+|Site \d+ failed in \w+)(?:: [^\n]*)?")
_RAISED = re.compile(r"The app raised an exception\.[\s\S]*?\n(\w*(?:Error|Exception)[^\n]*)")


def watch(launcher: Launcher, running: RunningSite, approvals: Approvals) -> None:
    """Print what happens until Ctrl-C, or an error when a process ends."""
    console = err()
    link = running.site.superlink
    console.print(f"Waiting for the server {link.address} …")
    try:
        launcher.await_site(running, HINT)
    except LaunchError:
        if not running.node.running:
            raise
        hint = "and does it do without TLS, as --insecure asks" if link.authority is None else "and does its port speak TLS"
        console.print(f"No answer yet. Is it running, can it be reached from here, {hint}? Trying on; see {running.node.log}.",
                      soft_wrap=True)
        launcher.await_site(running, forever=True)
    console.print(f"The server {running.site.superlink.address} accepted this site as number {running.site.number}. Ctrl-C stops it; "
                  "its state is kept.", soft_wrap=True)
    console.print(f"Logs: {running.node.log}, {running.starter.log}", soft_wrap=True)
    seen = {"node": 0, "app": 0}
    while True:
        launcher.check()
        said = running.node.said()
        for found in _ROUND.finditer(said, seen["node"]):
            console.print(f"run {found[1]}, round {found[2] or 0}: {WORDS.get(found[3], found[3])}")
            seen["node"] = found.end()
        said = running.starter.said()
        for found in sorted((m for p in (_REFUSED, _CANNOT, _RAISED) for m in p.finditer(said, seen["app"])), key=lambda m: m.start()):
            word = "Refused" if found.re is _REFUSED else "Failed"
            console.print(f"[red]{word}[/red] {escape(found[1] if found.re.groups else found[0])}", soft_wrap=True)
            if word == "Refused":
                console.print(f"Its bundle lies unopened in {approvals.refused}; to approve it: consilience federation approve "
                              f"{approvals.store} HASH", soft_wrap=True)
            seen["app"] = found.end()
        time.sleep(1)
