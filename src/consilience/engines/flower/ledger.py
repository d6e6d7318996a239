"""The server's folder: what was agreed, records, checkpoints with the last round accepted from every site, and the final model.

    federation.json config.json environment.json records.jsonl asked.json checkpoints/ final/ done

The files that a simulation's folder has as well have its form.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.client import ClientState
from ...core.federation import Federation
from ...core.snapshot import restore, snapshot
from ...errors import ConfigError, DataError
from ...runs.environment import describe_environment
from ...runs.files import disk, read_json, read_tensors, whole_folder, write_bytes, write_json, write_tensors
from ...runs.folder import read_done, read_records
from ...runs.lock import folder_lock, make_folder
from ...runs.result import summarise
from .roster import Member, Roster
from .settings import FederationSettings
from .versions import new_token, own_secret

KEEP = 2                       # newest checkpoints; sites keep as many accepted versions of their state
HOME = "CONSILIENCE_SERVER_DIR"


def server_folder(settings: FederationSettings) -> Path:
    """Where the server keeps its run. A relative path starts from CONSILIENCE_SERVER_DIR, or from ~/.consilience/federations."""
    base = Path(os.environ.get(HOME) or Path.home() / ".consilience" / "federations")
    name = settings.agreed.folder or f"{settings.agreed.label or 'federation'}-{settings.digest()}"
    return base / Path(name).expanduser()


class Ledger:
    """One federation on the server's disk."""

    def __init__(self, path: Path, settings: FederationSettings) -> None:
        self.path, self.settings = path, settings
        self.records: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        make_folder(self.path)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folder_lock(self.path))
            except ConfigError:
                raise ConfigError(f"Another run of this federation is under way and writes to {str(self.path)!r}. Wait for it, or end it: "
                                  "`flwr list consilience` shows its number, `flwr stop NUMBER consilience` ends it. A run beside it needs "
                                  "another 'folder'.") from None
            yield

    def open(self) -> str:
        """The federation's token: that of an earlier start, where the settings are the same."""
        known = self.path / "federation.json"
        if known.is_file():
            old = read_json(known)
            if old["digest"] != self.settings.digest():
                now = self.settings.flat()
                changed = sorted(k for k in old["settings"].keys() | now.keys() if old["settings"].get(k) != now.get(k))
                raise ConfigError(f"The server's folder {str(self.path)!r} holds a federation with other settings "
                                  f"({', '.join(changed)}). Choose another folder, or run with the old settings.")
            done = self.path / "done"
            if done.is_file() and read_done(self.path)["summary"]["rounds"] < self.settings.run.run.rounds:
                with disk("reopen", done):
                    done.unlink()                # it says how the shorter run ended
            return str(old["token"])
        if any(p.name not in (".lock", "secret") and not p.name.startswith(".") for p in self.path.iterdir()):
            raise ConfigError(f"The folder {str(self.path)!r} holds files, but no federation of ours. Choose an empty folder.")
        token = new_token()
        write_json(known, {"token": token, "digest": self.settings.digest(), "settings": self.settings.flat()})
        return token

    @property
    def done(self) -> bool:
        return (self.path / "done").is_file() and bool(self.records) and self.records[-1]["round"] >= self.settings.run.run.rounds

    def describe(self, fed: Federation, roster: Roster) -> None:
        """As a simulation's folder says what was run. The server cannot see who owns which rows: it goes by the sites' sizes."""
        a = self.settings.agreed
        stack = self.settings.run.stack()
        sizes = {str(n): m.sizes for n, m in sorted(roster.members.items())}
        data = {"name": "federation", "classes": a.classes, "clients": a.sites, "names": roster.names, "class_names": list(a.class_names),
                "transform": self.settings.make_transform().text, "hash": _hash({"sites": sizes, "sample": list(a.sample)})[:16]}
        write_json(self.path / "config.json", {"method": stack.canonical, "data": data, "places": {},
                                               "config": self.settings.run.settled(fed.policy)})
        write_json(self.path / "environment.json", describe_environment(fed.device) | {"engine": "flower"})

    def secret(self) -> bytes:
        return own_secret(self.path / "secret")

    def asked(self, round_number: int, sites: list[int]) -> list[int]:
        """All that were asked in this round so far, these included, also by a server that was killed in it."""
        path = self.path / "asked.json"
        held = read_json(path) if path.is_file() else {}
        every = sorted({*sites, *(held["sites"] if held.get("round") == round_number else ())})
        write_json(path, {"round": round_number, "sites": every})
        return every

    # ---- going on ----------------------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Sites known to the newest sound checkpoint; none of them is reachable yet."""
        found = self._newest()
        return [Member(int(n), m["name"], m["sizes"], was=m.get("node")) for n, m in found[1]["sites"].items()] if found else []

    def restore(self, fed: Federation) -> None:
        """Put the newest sound checkpoint into the federation, and cut the records to it."""
        found = self._newest()
        path = self.path / "records.jsonl"
        if found is None:
            if path.is_file():
                path.unlink()
            return
        tensors, about = found
        restore(fed, tensors, {**about["meta"], "clients": {}})
        for number, flags in about["accepted"].items():
            fed.clients.put(int(number), ClientState(fed.clients.fresh.tensors, **flags))
        fed.clients.commit()
        self.records = [r for r in read_records(path) if r["round"] <= fed.round_number] if path.is_file() else []
        write_bytes(path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in self.records).encode())

    def _newest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        damaged = []
        for folder in self._checkpoints():
            try:
                about = read_json(folder / "state.json")
                if about["hash"] != _hash({k: v for k, v in about.items() if k != "hash"}):
                    raise DataError(f"The file {str(folder / 'state.json')!r} is damaged.")
                return read_tensors(folder / "state.safetensors", about["sha256"]), about
            except (DataError, KeyError, TypeError) as error:
                damaged.append(str(error))
        if damaged:
            raise DataError(f"No checkpoint in {str(self.path)!r} can be read ({damaged[0].rstrip('.')}). Sites would be ahead of a server "
                            "that begins anew: choose another folder to do that.")
        return None

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*"), reverse=True)

    # ---- writing -----------------------------------------------------------------------------------------------------------

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        path = self.path / "records.jsonl"
        with disk("append to", path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def checkpoint(self, fed: Federation, roster: Roster) -> None:
        """After every round, before the next begins: sites count on it that the server never goes back further than two."""
        tensors, meta = snapshot(fed, clients=False)
        folder = self.path / "checkpoints" / f"round-{fed.round_number:06d}"
        about: dict[str, Any] = {
            "meta": meta, "sites": {str(n): {"name": m.name, "sizes": m.sizes, "node": m.was} for n, m in roster.members.items()},
            "accepted": {str(i): {"first": s.first, "seen": s.seen, "own_round": s.own_round} for i, s in fed.clients.visited()}}
        with disk("write the checkpoint", folder):
            with whole_folder(folder) as draft:
                about["sha256"] = write_tensors(draft / "state.safetensors", tensors)
                write_json(draft / "state.json", {**about, "hash": _hash(about)})
            for old in self._checkpoints()[KEEP:]:
                shutil.rmtree(old, ignore_errors=True)

    def finish(self, fed: Federation, stopped: str) -> None:
        """The final model. What is personal stays with the sites, in their stores."""
        write_tensors(self.path / "final" / "global.safetensors", {**fed.model["params"], **fed.model["buffers"]})
        write_json(self.path / "done", {"stopped": stopped, "summary": summarise(self.records, stopped)})


def _hash(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
