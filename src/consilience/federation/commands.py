"""The commands that start Flower's processes, and where they are reached. Nothing here starts anything."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .certificates import NodeKey, ServerFiles, hosts_of
from .processes import Child

CLOCKS = 295.0               # seconds by which a node's clock may differ: Flower signs each request with its time
CONNECTION = "consilience"   # the name of the SuperLink in the private Flower configuration


@dataclass(frozen=True)
class SuperLink:
    """Where a server listens, and the authority that vouches for it (None: plain text)."""

    address: str                       # host:port
    authority: Path | None
    child: Child | None = field(default=None, compare=False)

    def tls(self) -> list[str]:
        return ["--insecure"] if self.authority is None else ["--root-certificates", str(self.authority)]


@dataclass(frozen=True)
class Site:
    """What a site's operator says when starting it."""

    number: int
    data: str
    store: Path
    superlink: SuperLink
    key: NodeKey | None = None
    name: str = ""
    device: str = "auto"
    threads: int = 0
    poll: float = 3.0                  # seconds between two questions for work

    @property
    def label(self) -> str:
        return f"site-{self.number}"

    def node_config(self) -> str:
        """As `flower-supernode --node-config` takes it."""
        values = {"site": self.number, "data": self.data, "store": str(self.store.absolute() / "state"), "name": self.name,
                  "device": self.device, "threads": self.threads}
        return " ".join(f"{k}={toml_value(v)}" for k, v in values.items())


def superlink_command(host: str, port: int, certificates: ServerFiles | None, database: Path | None) -> list[str]:
    """The SuperLink behind its door, never installing what an app asks for."""
    command = [*_module("superlink"), "--host", host, "--port", str(port),
               "--disable-runtime-dependency-installation"]
    if database is not None:
        command += ["--database", str(database)]
    if certificates is None:
        return [*command, "--insecure"]
    _check_host(host, certificates)
    return [*command, "--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate),
            "--ssl-keyfile", str(certificates.key), "--enable-supernode-auth"]


def supernode_command(site: Site, port: int, secret: Path) -> list[str]:
    command = [*_module("supernode"), str(site.poll), "--superlink", site.superlink.address, *site.superlink.tls(),
               "--isolation", "process", "--host", "127.0.0.1", "--port", str(port), "--superexec-auth-secret-file", str(secret),
               "--node-config", site.node_config()]
    if site.superlink.authority is not None and site.key is not None:
        command += ["--auth-supernode-private-key", str(site.key.private)]
    return command


def starter_command(port: int, secret: Path, store: Path) -> list[str]:
    return [*_module("starter"), f"127.0.0.1:{port}", str(secret), str(store.absolute())]


def _module(name: str) -> list[str]:
    """One of our variants of Flower's processes. Not `python -m`, which would run the module again in every fork."""
    return [sys.executable, "-c", f"from consilience.engines.flower.{name} import main; main()"]


def connection_toml(address: str, authority: Path | None) -> str:
    """Flower's own configuration of a connection, as `flwr run APP consilience` reads it from FLWR_HOME/config.toml."""
    secure = f"root-certificates = {json.dumps(str(authority.absolute()))}\n" if authority else "insecure = true\n"
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{secure}'


def answers(link: SuperLink) -> bool:
    """Whether a SuperLink answers under its address with a certificate of its authority."""
    with contextlib.suppress(urllib.error.URLError, OSError), _health(link) as reply:
        return 200 <= reply.status < 300
    return False


def clocks_apart(link: SuperLink) -> str | None:
    """What is wrong where this machine's clock and the server's differ by more than Flower bears; None where they agree, or the server
    does not answer.
    """
    with contextlib.suppress(urllib.error.URLError, OSError, TypeError, ValueError), _health(link) as reply:
        theirs, ours = parsedate_to_datetime(reply.headers["Date"]), datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
        if abs((theirs - ours).total_seconds()) > CLOCKS:
            return (f"The clock of this machine says {ours:%Y-%m-%d %H:%M} UTC, that of the server {link.address} {theirs:%Y-%m-%d %H:%M} "
                    "UTC. A site is let in only where both agree to five minutes: set the wrong one right, and start the site again.")
    return None


def _health(link: SuperLink) -> Any:
    context = ssl.create_default_context(cafile=str(link.authority)) if link.authority else None
    return urllib.request.urlopen(f"{'https' if link.authority else 'http'}://{link.address}/health", timeout=5, context=context)


def free_port(host: str, wanted: int = 0) -> int:
    """A port nobody listens on now: any, or the one that is wanted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)          # connections of a server that was here before do not count
        try:
            probe.bind((host, wanted))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"Port {wanted} is in use on this machine: another server, perhaps one that was not stopped? Stop it, or "
                                  "choose another with --port.") from None
            if error.errno == errno.EACCES:
                raise ConfigError(f"This user may not listen on port {wanted}. Choose one from 1024 on with --port.") from None
            raise ConfigError(f"This machine has no address {host!r} to listen on: {error.strerror or error}.") from None
        return int(probe.getsockname()[1])


def check_address(address: str) -> None:
    """Refuse what is not host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise ConfigError(f"A server's address is written host:port, as in hub.example.org:9092. Got {address!r} instead.")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def command_path(name: str) -> str:
    """A command of Flower, beside the Python that runs us or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise ConfigError(f"The command {name!r} was not found. Install Flower with: pip install 'consilience[flower]'")
    return found


def _check_host(host: str, certificates: ServerFiles) -> None:
    known = hosts_of(certificates.certificate)
    if host not in (*known, "0.0.0.0", "::"):
        raise ConfigError(f"The server's certificate is not for {host!r} but for {', '.join(known)}. Make one for it with: consilience "
                          f"federation certificates {certificates.folder} --host {host} --again")


def override_arguments(overrides: Mapping[str, Any] | None, path: Path) -> list[str]:
    """Overrides travel in a file: on a command line Flower cuts values at quotes."""
    if not overrides:
        return []
    path.write_text("".join(f"{k} = {toml_value(v)}\n" for k, v in overrides.items()), encoding="utf-8")
    return ["--run-config", str(path)]


def toml_value(value: Any) -> str:
    """A plain value as TOML, and as Flower's own reader of key=value lists takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    if any(ord(ch) < 32 for ch in text) or ("'" in text and '"' in text) or ('"' not in text and "\\" in text and "'" in text):
        raise ConfigError(f"A setting of a federation cannot hold both kinds of quotes, or line breaks. Got {text!r} instead.")
    return f"'{text}'" if '"' in text or "\\" in text else f'"{text}"'
