"""Which apps a site's operator has approved. Flower ships an app's code to the sites; nothing of an app that is not on this list runs.

An app is known by the SHA-256 of its bundle (.fab), which covers its code and its settings. A run may override settings without
changing the bundle, so an approval also says which settings may differ; by default only those that do not concern a site.

    approved.json        the list, in the site's store folder
    refused/             what was refused: bundles to look at, and refused.jsonl
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..runs.files import disk, read_json, write_bytes, write_json

HARMLESS = ("folder", "label")                       # the server's own affair
STUDY = ("eval_every", "lr", "method", "rounds", "seed")     # what a study varies from run to run
ANY = "*"
PROJECT = "pyproject.toml"
SHOWN = 12                                           # settings named in a refusal
KEEP = 20                                            # refused bundles kept to look at
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Approvals:
    """A site's list. Read anew for every message, so that approving and revoking need no restart."""

    store: Path

    @property
    def path(self) -> Path:
        return self.store / "approved.json"

    @property
    def refused(self) -> Path:
        return self.store / "refused"

    def all(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        held = read_json(self.path)
        if not isinstance(held, dict) or not isinstance(held.get("apps"), dict):
            raise DataError(f"The file {str(self.path)!r} is damaged: a table of approved apps was expected.")
        return held["apps"]

    def approve(self, sha256: str, overrides: Iterable[str] = (), note: str = "") -> dict[str, Any]:
        if not _HASH.fullmatch(sha256):
            raise ConfigError(f"An app's hash has 64 hexadecimal digits. Got {sha256!r} instead. `consilience federation hash APP` prints "
                              "an app's.")
        with disk("make", self.store):
            self.store.mkdir(parents=True, exist_ok=True, mode=0o700)        # it may be the first that makes the store
        entry = {"approved": _now(), "overrides": sorted(set(overrides)), "note": note}
        write_json(self.path, {"apps": {**self.all(), sha256: entry}})
        return entry

    def revoke(self, sha256: str) -> None:
        apps = self.all()
        if sha256 not in apps:
            hint = "" if _HASH.fullmatch(sha256) else " Its whole hash is needed, as `consilience federation approvals STORE` lists it."
            raise ConfigError(f"The app {sha256!r} is not approved here, so nothing was taken back.{hint}")
        write_json(self.path, {"apps": {k: v for k, v in apps.items() if k != sha256}})

    def objection(self, content: bytes, run_config: Mapping[str, Any]) -> str | None:
        """Why a bundle with this run configuration may not run here; None if it may."""
        sha256 = hash_of(content)
        approved = self.all().get(sha256)
        if approved is None:
            return f"the site's operator has not approved the app with hash {sha256}"
        allowed = {*HARMLESS, *(str(o).replace("-", "_") for o in approved.get("overrides", ()))}
        if ANY in allowed:
            return None
        own = own_settings(content)
        changed = sorted(k for k, v in run_config.items() if own.get(k) != v and k.replace("-", "_") not in allowed)
        if changed:
            names = ", ".join(map(_short, changed[:SHOWN])) + (", …" if len(changed) > SHOWN else "")
            return (f"the site's operator approved the app with hash {sha256}, but not a change of {names} by the run "
                    f"({'; '.join(f'{_short(k)} = {_short(repr(run_config[k]))} in place of {own.get(k)!r}' for k in changed[:3])})")
        return None

    def refuse(self, content: bytes, why: str, run: int | None = None) -> str:
        """Note a refusal and keep the bundle, unopened, for the operator to look at. Returns the bundle's hash."""
        sha256 = hash_of(content)
        with disk("write", self.refused):
            self.refused.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self.refused / "refused.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": _now(), "run": run, "hash": sha256, "why": why}) + "\n")
        target = self.refused / f"{sha256}.fab"
        if not target.exists() and len(list(self.refused.glob("*.fab"))) < KEEP:
            write_bytes(target, content)
        return sha256


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def own_settings(content: bytes) -> dict[str, Any]:
    """The settings in a bundle's own pyproject.toml, by flat names."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as bundle:
            if PROJECT not in bundle.namelist():
                raise DataError(f"The app's bundle cannot be read: it has no {PROJECT}.")
            project = tomllib.loads(bundle.read(PROJECT).decode())
    except (zipfile.BadZipFile, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"The app's bundle cannot be read: {error}.") from None
    try:
        return _flat(project["tool"]["flwr"]["app"].get("config", {}))
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"The app's bundle cannot be read: its {PROJECT} has no table tool.flwr.app with the app's settings.") from None


def files_in(content: bytes) -> list[tuple[str, int]]:
    """What a bundle holds, by name and size, without unpacking it."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as bundle:
            return [(i.filename, i.file_size) for i in bundle.infolist()]
    except zipfile.BadZipFile as error:
        raise DataError(f"The app's bundle cannot be read: {error}.") from None


def _short(word: str) -> str:
    """A word of somebody else's for a log: nothing that a terminal would obey, nor much of it."""
    return "".join(ch if ch.isprintable() else "?" for ch in word[:80])


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
