"""Which keys a server has admitted, and under which node number: Flower's own commands speak of numbers alone.

The SuperLink's database decides who is let in; this list only gives its nodes back their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..runs.files import read_json, write_json
from .commands import SuperLink
from .launch import Launcher
from .processes import LaunchError

TAKEN_BACK = "unregistered"          # Flower's word for it


@dataclass(frozen=True)
class Door:
    """Who may come in at a running server."""

    launcher: Launcher
    link: SuperLink

    @property
    def path(self) -> Path:
        return self.launcher.folder / "admitted.json"

    def admit(self, public: Path) -> str | None:
        """The node number of a key that is let in from now on; None where it was admitted before."""
        text = read_key(public)
        try:
            node = self.launcher.register(self.link, public)[0]
        except LaunchError as error:
            if "already in use" not in str(error):
                raise
            node = self._known().get(text, "")
            if self._status().get(node) == TAKEN_BACK:
                raise ConfigError(f"The key {str(public)!r} (node {node}) was taken back, and Flower admits a key once. The site moves "
                                  "site.key and site.pub out of its store, makes another key with `consilience federation key STORE`, "
                                  "and sends the new site.pub.") from None
            return None
        write_json(self.path, {"keys": {**self._known(), text: node}})
        return node

    def dismiss(self, what: str) -> str:
        """Take a key back, given as its file or as its node's number; the number."""
        status = self._status()
        if what.isdecimal():
            node = what
        else:
            node = self._known().get(read_key(Path(what)), "")
            if not node:
                raise ConfigError(f"This server's folder does not say which node has the key {what!r}. Name the node by its number; "
                                  f"those there: {_some(status)}.")
        if node not in status:
            raise ConfigError(f"There is no node {node} here. Those there: {_some(status)}.")
        if status[node] == TAKEN_BACK:
            raise ConfigError(f"The key of node {node} was taken back before.")
        self.launcher.flwr(["supernode", "unregister", node, self.launcher.name, "--format", "json"], self.link)
        return node

    def _known(self) -> dict[str, str]:
        """Key -> node."""
        held = read_json(self.path) if self.path.is_file() else {"keys": {}}
        if not isinstance(held, dict) or not isinstance(held.get("keys"), dict):
            raise DataError(f"The file {str(self.path)!r} is damaged: a table of keys was expected. It may be deleted; nodes are then "
                            "named by their numbers.")
        return held["keys"]

    def _status(self) -> dict[str, str]:
        """Node -> what Flower says of it."""
        nodes: list[dict[str, Any]] = self.launcher.flwr_json(["supernode", "list", self.launcher.name, "--verbose", "--format", "json"],
                                                              self.link).get("nodes", [])
        return {str(n.get("node-id")): str(n.get("status")) for n in nodes}


def read_key(public: Path) -> str:
    """A public key's text without its remark."""
    if not public.is_file():
        raise ConfigError(f"There is no public key {str(public)!r}. A site makes one with: consilience federation key STORE")
    words = public.read_bytes().decode(errors="replace").split()
    if len(words) < 2 or words[0] != "ecdsa-sha2-nistp384":
        raise ConfigError(f"The file {str(public)!r} is not a site's public key: that is one line that begins with ecdsa-sha2-nistp384. "
                          "Ask the site for its site.pub (never for its site.key).")
    return " ".join(words[:2])


def _some(status: dict[str, str], most: int = 12) -> str:
    shown: Sequence[str] = [f"{node} ({word})" for node, word in status.items()]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "") or "none"
