"""Start Flower's processes as a federation needs them: TLS and node authentication, a private home, telemetry off, logs in files.

    with Launcher(folder, certificates=files) as launcher:
        link = launcher.superlink()                                  # waits until it answers
        launcher.register(link, key.public)                          # the server's operator admits a site's key
        launcher.site(Site(number=0, data="arrays(path='a.npz')", store=folder / "site-0", superlink=link, key=key))
        run = launcher.flwr_run(app, link, {"rounds": 3})
        run.wait()

Leaving the block stops all of it. Only `insecure=True` does without TLS and keys.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..runs.files import disk, write_bytes
from . import require_flower
from .certificates import ServerFiles
from .commands import (
    CONNECTION,
    Site,
    SuperLink,
    answers,
    clocks_apart,
    command_path,
    connection_toml,
    free_port,
    join_address,
    override_arguments,
    starter_command,
    superlink_command,
    supernode_command,
)
from .processes import Child, LaunchError, Processes, end_marked
from .trust import check_server

_STARTED = re.compile(r"Successfully started run (\d+)")
READY = 120.0                # seconds for a process to become ready; a busy machine takes a while to import everything
NOT_LET_IN = "[code: 2004]"  # Flower's word for a key that it does not know, and for one whose node it believes there
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "GRPC_VERBOSITY": "NONE", "NO_COLOR": "1", "TERM": "dumb",
         "FORWARDED_ALLOW_IPS": "127.0.0.1"}     # nobody else is believed about where a request comes from


class NotLetIn(LaunchError):
    """The server turns a site away; somebody has to mend what the message says."""

    exit_code = 2


@dataclass
class RunningSite:
    """A site's two processes: Flower's SuperNode, and the starter that runs approved apps."""

    site: Site
    node: Child
    starter: Child

    @property
    def running(self) -> bool:
        return self.node.running and self.starter.running

    @property
    def turned_away(self) -> bool:
        """Whether the server did not let it in: its key is unknown, or the server believes it connected already."""
        return NOT_LET_IN in self.node.said()

    def stop(self) -> None:
        self.node.stop()
        self.starter.stop()

    def kill(self) -> None:
        self.starter.kill()
        self.node.kill()


@dataclass
class FlowerRun:
    """A run that `flwr run` started; its child follows the log until the run ends."""

    number: str
    follow: Child
    launcher: Launcher
    superlink: SuperLink

    @property
    def running(self) -> bool:
        return self.follow.running

    def wait(self, seconds: float | None = None) -> str:
        """Until the run ends; its status in Flower's words: finished:completed, finished:failed, …"""
        self.follow.wait(seconds)
        return self.status()

    def status(self) -> str:
        """As `flwr list` says it."""
        said = self.launcher.flwr(["list", "--run-id", self.number, self.launcher.name, "--format", "json"], self.superlink)
        for run in _json(said).get("runs", []):
            if str(run.get("run-id")) == self.number:
                return str(run.get("status"))
        return "unknown"

    def stop(self) -> None:
        self.launcher.flwr(["stop", self.number, self.launcher.name], self.superlink)


class Launcher(Processes):
    """Starts processes and stops them. Everything they write lies under `folder`."""

    def __init__(self, folder: str | Path, *, certificates: ServerFiles | None = None, insecure: bool = False,
                 client: bool = False, connection: str | None = None) -> None:
        """With `client` it starts sites or runs alone, and needs no server certificate. `connection` names one in the user's own
        Flower configuration, which is then read and otherwise left alone."""
        require_flower()
        if certificates is None and not insecure and not client:
            raise ConfigError("A federation uses TLS and node keys: give it certificates, or say --insecure for a test on one machine.")
        if certificates is not None and insecure:
            raise ConfigError("Certificates and --insecure contradict each other; leave one of them out.")
        self.folder, self.certificates = Path(folder).absolute(), check_server(certificates) if certificates else None
        with disk("make", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = str(Path(sys.executable).parent)            # Flower's commands start each other by name
        super().__init__({**QUIET, "PATH": beside + os.pathsep + os.environ.get("PATH", os.defpath)})

        self.calls, self.followers, self.connection = 0, list[Child](), connection

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    # ---- the server ------------------------------------------------------------------------------------------------

    def superlink(self, host: str = "127.0.0.1", port: int | None = None, *, database: Path | None = None) -> SuperLink:
        """Start a SuperLink and wait until it answers. With a database it remembers nodes and runs when it is started again."""
        self._clear()
        port = free_port(host, port or 0)                    # before it starts: whoever holds the port would answer in its place
        command = superlink_command(host, port, self.certificates, database)
        env = {**self._home("server"), "CONSILIENCE_SERVER_DIR": str(self.folder / "runs")}          # for runs that name no folder
        child = self.start("The SuperLink", command, self.log("superlink"), env=env)
        local = "127.0.0.1" if host in ("0.0.0.0", "127.0.0.1", "localhost") else "::1" if host == "::" else host
        link = SuperLink(join_address(local, port), self.certificates.authority if self.certificates else None, child)
        child.wait_for(lambda: answers(link), f"it answers on {link.address}", READY)
        self._connect(link)
        return link

    def _clear(self) -> None:
        """End what a server of this folder left that was killed. Its SuperLink may hold on to the database and wait for whoever follows a
        run's log, and the run's own process would go on beside the one that resumes it. The mark in a copy of a folder is another
        server's, which may be at work.
        """
        path = self.folder / "mark"
        if path.is_file():
            mark, _, folder = path.read_text(encoding="utf-8", errors="replace").partition("\n")
            if folder == str(self.folder):
                end_marked(mark)
        write_bytes(path, f"{self.mark}\n{self.folder}".encode())

    def register(self, link: SuperLink, *public: Path) -> list[str]:
        """Admit sites' public keys, several at a time; the numbers Flower gives their nodes."""
        with ThreadPoolExecutor(max(len(public), 1)) as pool:
            said = pool.map(lambda key: self.flwr(["supernode", "register", str(key), self.name, "--format", "json"], link), public)
            return [str(_json(text).get("node-id", "")) for text in said]

    # ---- a site ----------------------------------------------------------------------------------------------------

    def site(self, site: Site, wait: bool = True) -> RunningSite:
        """Start a SuperNode and the starter of approved apps; by default wait until the server has accepted it."""
        if site.superlink.authority is not None and site.key is None:
            raise ConfigError(f"Site {site.number} has no key. Make one with: consilience federation key "
                              f"{shlex.quote(str(site.store))}")
        for path in (site.store, site.store / "state"):
            with disk("make", path):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = site.store / "runtime.secret"               # only our starter may take tasks from our SuperNode
        secret.unlink(missing_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        port = free_port("127.0.0.1")
        home = self._home(site.label, site.store / "flower")
        node = self.start(f"The SuperNode of site {site.number}", supernode_command(site, port, secret), self.log(f"{site.label}-node"),
                          env=home)
        starter = self.start(f"The starter of site {site.number}", starter_command(port, secret, site.store), self.log(f"{site.label}-app"),
                             env=home)
        running = RunningSite(site, node, starter)
        if wait:
            self.await_site(running)
        return running

    def await_site(self, running: RunningSite, seconds: float = READY, *, forever: bool = False) -> None:
        """Until the server has accepted the site. A server that is not there yet is waited for, for ever if asked."""
        link, node = running.site.superlink, running.node
        try:
            node.wait_for(lambda: "SuperNode ID:" in node.said(), f"the server {link.address} accepts it",
                          float("inf") if forever else seconds)
        except LaunchError:
            why = _why_not(running)
            if why is None:
                raise
            raise NotLetIn(why) from None

    def start_again(self, running: RunningSite) -> RunningSite:
        """A site's processes anew, in place of those that the server turned away."""
        running.stop()
        for child in (running.node, running.starter):
            self.children.remove(child)
        return self.site(running.site, wait=False)

    # ---- runs ------------------------------------------------------------------------------------------------------

    def flwr_run(self, app: Path, link: SuperLink, overrides: Mapping[str, Any] | None = None, name: str = "run") -> FlowerRun:
        """Start a run of an app and follow its log. Overrides are settings that differ from the app's own."""
        self._connect(link)
        command = [command_path("flwr"), "run", str(app), self.name, "--stream",
                   *override_arguments(overrides, self.folder / f"{name}.toml")]
        follow = Child(f"The run of {app.name}", command, self.log(name), {**self.env, **self._command_home()})
        self.followers.append(follow)            # not among the children: it ends with its run, which is no fault
        follow.wait_for(lambda: bool(_STARTED.search(follow.said())), "Flower says that it started", READY)
        found = _STARTED.search(follow.said())
        assert found is not None
        return FlowerRun(found[1], follow, self, link)

    def flwr(self, arguments: Sequence[str], link: SuperLink) -> str:
        """Run a command of `flwr` to its end; what it printed."""
        self._connect(link)
        self.calls += 1
        name = "-".join([*(a for a in arguments[:2] if a.isalpha()), str(self.calls)])       # several may run at a time
        child = Child(f"flwr {' '.join(arguments[:2])}", [command_path("flwr"), *arguments], self.log(f"flwr-{name}"),
                      {**self.env, **self._command_home()})
        try:
            code = child.wait(READY)
        finally:
            child.stop()
        said = child.said()
        if code or _json(said).get("success") is False:
            raise LaunchError(f"{child.name} failed:\n{_indent(str(_json(said).get('error-message') or said))}")
        return said

    def flwr_json(self, arguments: Sequence[str], link: SuperLink) -> dict[str, Any]:
        """The document that a command of `flwr` printed."""
        return _json(self.flwr(arguments, link))

    def stop(self) -> None:
        for child in self.followers:
            child.stop(1.0)
        self.followers.clear()
        super().stop()

    @property
    def name(self) -> str:
        """The connection's name, as Flower's commands take it."""
        return self.connection or CONNECTION

    def _command_home(self) -> dict[str, str]:
        return {} if self.connection else self._home("server")

    def _home(self, name: str, folder: Path | None = None) -> dict[str, str]:
        """A private FLWR_HOME, so that nothing of the user's own Flower is touched."""
        home = (folder or self.folder / "flower" / name).absolute()
        with disk("make", home):
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {"FLWR_HOME": str(home)}

    def _connect(self, link: SuperLink) -> None:
        """Tell `flwr` how to reach the SuperLink."""
        if self.connection:
            return
        path, text = Path(self._home("server")["FLWR_HOME"]) / "config.toml", connection_toml(link.address, link.authority)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def connect(folder: str | Path) -> tuple[Launcher, SuperLink]:
    """A launcher for runs on a server that `consilience federation server` started in that folder."""
    path = Path(folder) / "flower" / "server" / "config.toml"
    try:
        held = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"][CONNECTION]
        authority = held.get("root-certificates")
        link = SuperLink(held["address"], Path(authority) if authority else None)
    except FileNotFoundError:
        raise ConfigError(f"No server was started in {str(folder)!r}. Start one with: consilience federation server {folder} …") from None
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(f"The file {str(path)!r} is damaged: {error}.") from None
    if not answers(link):
        raise ConfigError(f"The server in {str(folder)!r} does not answer on {link.address}. Is it running on this machine?")
    return Launcher(folder, client=True), link


def elsewhere(connection: str, folder: str | Path) -> tuple[Launcher, SuperLink]:
    """A launcher for runs over a connection of the user's own Flower configuration; its logs lie in `folder`."""
    return Launcher(folder, client=True, connection=connection), SuperLink(connection, None)


def _why_not(running: RunningSite) -> str | None:
    """A SuperNode's refusal in words that say what to do."""
    said, site = running.node.said(), running.site
    where = site.superlink.address
    if "CERTIFICATE_VERIFY_FAILED" in said and "certificate has expired" in said:
        return f"The certificate that the server {where} shows has ended, or this machine's clock is wrong. Tell the server's operator."
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return (f"The server {where} shows a certificate that {str(site.superlink.authority)!r} does not vouch for, or that is for another "
                "name. Ask its operator for ca.crt, and for the name to use.")
    if running.turned_away:
        return (f"The server {where} does not know this site's key, or another site with the same key is connected. Its operator admits "
                f"a key with: consilience federation admit SERVER-FOLDER {site.key.public.name if site.key else 'site.pub'}")
    if running.node.process.poll() == 0:               # Flower ends it without a word where its signature was not taken
        return clocks_apart(site.superlink)
    return None


def _json(text: str) -> dict[str, Any]:
    """The JSON document among what a command of Flower printed."""
    found = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        return json.loads(found.group()) if found else {}
    except json.JSONDecodeError:
        return {}


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines() if line.strip())


__all__ = ["FlowerRun", "Launcher", "RunningSite", "Site", "SuperLink"]
