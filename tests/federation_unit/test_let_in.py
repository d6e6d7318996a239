"""What a site says and does until a server lets it in, while the server is away, and when its key is taken back. No process is started."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilience.cli import federation_site
from consilience.cli.federation_site import let_in, watch
from consilience.errors import ConfigError
from consilience.federation import commands
from consilience.federation.admitted import Door, read_key
from consilience.federation.approval import Approvals
from consilience.federation.certificates import make_key
from consilience.federation.commands import Site, SuperLink
from consilience.federation.launch import Launcher, NotLetIn, RunningSite
from consilience.federation.processes import LaunchError

REFUSAL = "Exit Code: 305\n[code: 2004] could not be activated\n"
ACCEPTED = "SuperNode ID: 17\n"


class Node:
    """A SuperNode that has said something, and runs or has ended."""

    def __init__(self, said: str, code: int | None = None) -> None:
        self.text, self.log, self.name = said, Path("node.log"), "The SuperNode"
        self.process = SimpleNamespace(poll=lambda: code, returncode=code)
        self.running = code is None

    def said(self) -> str:
        return self.text

    def stop(self) -> None:
        self.running = False

    def wait_for(self, ready, what, seconds) -> None:
        if not ready():
            raise LaunchError(f"no {what}")


class Starts(Launcher):
    """A launcher whose SuperNodes say what they are told to, one after another."""

    def __init__(self, tmp_path: Path, nodes: list[Node]) -> None:
        super().__init__(tmp_path / "store", client=True)
        self.nodes = nodes

    def site(self, site: Site, wait: bool = True) -> RunningSite:
        running: Any = RunningSite(site, self.nodes.pop(0), Node(""))
        self.children = [running.node, running.starter]
        return running


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only by sleeping."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
    monkeypatch.setattr(federation_site, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def a_site(tmp_path: Path) -> Site:
    return Site(1, "arrays(path='a.npz')", tmp_path / "store", SuperLink("hub:9092", tmp_path / "ca.crt"), make_key(tmp_path / "key"))


def test_a_site_that_was_killed_asks_until_the_server_has_noticed(tmp_path: Path, clock: list[float]) -> None:
    launcher, said = Starts(tmp_path, [Node(REFUSAL, 1), Node(REFUSAL, 1), Node(ACCEPTED)]), list[str]()
    running = let_in(launcher, launcher.site(a_site(tmp_path)), said.append)
    assert running.node.said() == ACCEPTED
    assert launcher.children == [running.node, running.starter]
    assert clock[0] == 2 * federation_site.AGAIN
    assert len(said) == 1
    assert "after a crash" in said[0]


def test_an_unknown_key_is_said_in_the_end_with_exit_code_2(tmp_path: Path, clock: list[float]) -> None:
    launcher = Starts(tmp_path, [Node(REFUSAL, 1) for _ in range(100)])
    with pytest.raises(NotLetIn, match=r"does not know this site's key.*federation admit") as refused:
        let_in(launcher, launcher.site(a_site(tmp_path)), lambda text: None)
    assert refused.value.exit_code == 2
    assert federation_site.PATIENCE < clock[0] <= federation_site.PATIENCE + 2 * federation_site.AGAIN


@pytest.mark.parametrize(("said", "why"), [("CERTIFICATE_VERIFY_FAILED: certificate has expired", "has ended"),
                                           ("CERTIFICATE_VERIFY_FAILED: unable to get issuer", "does not vouch for")])
def test_a_wrong_certificate_is_not_asked_again(said: str, why: str, tmp_path: Path, clock: list[float]) -> None:
    launcher = Starts(tmp_path, [Node(said, 1)])
    with pytest.raises(NotLetIn, match=why):
        let_in(launcher, launcher.site(a_site(tmp_path)), lambda text: None)
    assert clock[0] == 0


@pytest.mark.parametrize("seconds", [-86400, 0, 86400])
def test_a_clock_that_is_wrong(seconds: int, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower ends a SuperNode without a word and with code 0 where the server did not take its signature, which holds the time."""
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = replace(a_site(tmp_path), superlink=SuperLink(f"127.0.0.1:{server.server_port}", None))
    true = time.time
    monkeypatch.setattr(commands, "time", SimpleNamespace(time=lambda: true() + seconds))
    launcher = Starts(tmp_path, [Node("SuperNode terminated gracefully.", 0)])
    with pytest.raises(LaunchError) as raised:
        let_in(launcher, launcher.site(site), lambda text: None)
    assert isinstance(raised.value, NotLetIn) is bool(seconds)
    assert ("The clock of this machine says" in str(raised.value)) is bool(seconds)
    server.shutdown()
    server.server_close()


def test_a_server_that_goes_away_and_returns_and_takes_the_key_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(ACCEPTED)
    launcher = Starts(tmp_path, [node])
    script = iter(["Connection attempt failed, retrying in 1 seconds\n", "Connection attempt failed, retrying in 3 seconds\n",
                   "Connection successful after 4 seconds and 3 tries.\n", ""])

    def sleep(seconds: float) -> None:
        more = next(script)
        node.text += more
        if not more:
            node.process.poll = lambda: 0
    monkeypatch.setattr(federation_site, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    with pytest.raises(NotLetIn, match="has taken this site's key back"):
        watch(launcher, launcher.site(a_site(tmp_path)), Approvals(tmp_path))
    told = [line for line in capsys.readouterr().err.splitlines() if "answer" in line]
    assert told == ["The server hub:9092 does not answer. This site keeps its state, waits, and asks again.",
                    "The server hub:9092 answers again."]


def test_an_address_in_brackets_is_said_whole(tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """[fe80::1] looks like a sign to the terminal, and vanished."""
    site = replace(a_site(tmp_path), superlink=SuperLink("[fe80::1]:9092", tmp_path / "ca.crt"))
    launcher = Starts(tmp_path, [Node("CERTIFICATE_VERIFY_FAILED: certificate has expired", 1)])
    with pytest.raises(NotLetIn, match=r"\[fe80::1\]:9092 shows has ended"):
        watch(launcher, launcher.site(site), Approvals(tmp_path))
    assert "Waiting for the server [fe80::1]:9092" in capsys.readouterr().err


def test_a_key_that_was_taken_back_is_not_said_to_be_admitted(tmp_path: Path) -> None:
    class Flower:
        """A SuperLink that knows one key, and has nodes."""
        folder, name, calls = tmp_path, "consilience", list[list[str]]()
        taken, status = False, "online"

        def register(self, link, public) -> list[str]:
            if self.taken:
                raise LaunchError("Public key already in use")
            self.taken = True
            return ["17"]

        def flwr_json(self, arguments, link) -> dict[str, Any]:
            return {"nodes": [{"node-id": "17", "status": self.status}]}

        def flwr(self, arguments, link) -> str:
            self.calls.append(arguments)
            self.status = "unregistered"
            return ""
    flower, public = Flower(), make_key(tmp_path / "s").public
    door = Door(flower, SuperLink("hub:9092", None))              # type: ignore[arg-type]
    assert door.admit(public) == "17"
    assert door.admit(public) is None
    with pytest.raises(ConfigError, match=r"no node 18 here. Those there: 17 \(online\)"):
        door.dismiss("18")
    assert door.dismiss(str(public)) == "17"
    assert flower.calls == [["supernode", "unregister", "17", "consilience", "--format", "json"]]
    with pytest.raises(ConfigError, match=r"was taken back, and Flower admits a key once"):
        door.admit(public)
    with pytest.raises(ConfigError, match="was taken back before"):
        door.dismiss("17")


def test_a_private_key_is_not_taken_for_a_public_one(tmp_path: Path) -> None:
    pair = make_key(tmp_path / "s")
    with pytest.raises(ConfigError, match=r"never for its site.key"):
        read_key(pair.private)
