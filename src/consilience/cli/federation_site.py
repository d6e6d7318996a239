"""What a site's operator sees while the site runs: that it was accepted, each round, and every refusal."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable

from rich.markup import escape

from ..federation.approval import Approvals
from ..federation.commands import clocks_apart
from ..federation.launch import Launcher, NotLetIn, RunningSite
from ..federation.processes import LaunchError
from .output import err

HINT = 30.0               # seconds without an answer after which a hint is due
PATIENCE = 45.0           # seconds during which a server may believe a site connected that was killed; it is about 20
AGAIN = 3.0               # seconds before a site that was turned away asks again
WORDS = {"query": "asked before training", "train": "training", "evaluate": "scoring"}
_ROUND = re.compile(r"\[RUN (\d+)(?:, ROUND (\S+))?\]\s*\n(?:.*\n)?.*Receiving: (\S+) message")
_AWAY = re.compile(r"Connection attempt failed|(Connection successful)")
_REFUSED = re.compile(r"REFUSED (run \d+: .*)")
_CANNOT = re.compile(r"(?:This site cannot take part|Site \d+ cannot answer \w+|Site \d+ failed in \w+)(?:: [^\n]*)?|"
                     r"The process that ran the app died[^\n]*")
_RAISED = re.compile(r"The app raised an exception\.[\s\S]*?\n(\w*(?:Error|Exception)[^\n]*)")


def watch(launcher: Launcher, running: RunningSite, approvals: Approvals) -> None:
    """Print what happens until Ctrl-C, or an error when a process ends."""
    console = err()
    link = running.site.superlink
    console.print(f"Waiting for the server {link.address} …", markup=False)
    running = let_in(launcher, running, lambda text: console.print(text, soft_wrap=True, markup=False))
    console.print(f"The server {running.site.superlink.address} accepted this site as number {running.site.number}. Ctrl-C stops it; "
                  "its state is kept.", soft_wrap=True, markup=False)
    console.print(f"Logs: {running.node.log}, {running.starter.log}", soft_wrap=True, markup=False)
    seen, away = {"node": 0, "link": len(running.node.said()), "app": 0}, False
    while True:
        if running.node.process.poll() == 0:           # Flower ends it so when its key was taken back, and when it is told to stop
            if apart := clocks_apart(link):
                raise NotLetIn(apart)
            raise NotLetIn(f"The SuperNode ended: the operator of the server {link.address} has taken this site's key back, or somebody "
                           "stopped the process on this machine. Ask; a key that was taken back is not admitted again, the site needs "
                           "a new one. Otherwise start the site again.")
        launcher.check()
        said = running.node.said()
        for found in _ROUND.finditer(said, seen["node"]):
            console.print(f"run {found[1]}, round {found[2] or 0}: {WORDS.get(found[3], found[3])}", markup=False)
            seen["node"] = found.end()
        for found in _AWAY.finditer(said, seen["link"]):
            seen["link"] = found.end()
            if away == bool(found[1]):
                away = not away
                console.print(f"The server {link.address} does not answer. This site keeps its state, waits, and asks again."
                              if away else f"The server {link.address} answers again.", soft_wrap=True, markup=False)
        said = running.starter.said()
        for found in sorted((m for p in (_REFUSED, _CANNOT, _RAISED) for m in p.finditer(said, seen["app"])), key=lambda m: m.start()):
            word = "Refused" if found.re is _REFUSED else "Failed"
            console.print(f"[red]{word}[/red] {escape(found[1] if found.re.groups else found[0])}", soft_wrap=True)
            if word == "Refused":
                console.print(f"Its bundle is kept unopened in {approvals.refused}; to approve it: consilience federation approve "
                              f"{shlex.quote(str(approvals.store))} HASH", soft_wrap=True, markup=False)
            elif found[0].startswith("This site cannot take part"):
                console.print("Once that is fixed, start the site again: a run asks a site that could not take part only after it was "
                              "away.", soft_wrap=True)
            seen["app"] = found.end()
        time.sleep(1)


def let_in(launcher: Launcher, running: RunningSite, say: Callable[[str], None]) -> RunningSite:
    """Until the server has accepted the site; the processes that it accepted.

    A server does not notice at once that a site was killed. Until then it turns the site away that is started again, in the
    words it has for an unknown key.
    """
    link = running.site.superlink
    end: float | None = None
    hinted = False
    while True:
        try:
            launcher.await_site(running, HINT)
            return running
        except NotLetIn:
            if not running.turned_away or (end is not None and time.monotonic() > end):
                raise
            if end is None:
                end = time.monotonic() + PATIENCE
                say(f"The server {link.address} does not let this site in: it does not know its key, or believes the site still connected, "
                    f"as it does for some seconds after a crash. Asking again for {PATIENCE:.0f} seconds.")
            time.sleep(AGAIN)
            running = launcher.start_again(running)
        except LaunchError:
            if not running.node.running:
                raise
            if not hinted:
                hint = "and does it do without TLS, as --insecure asks" if link.authority is None else "and does its port speak TLS"
                say(f"No answer yet. Is it running, can it be reached from here, {hint}? Still trying; see {running.node.log}.")
                hinted = True
