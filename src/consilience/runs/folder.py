"""A run's folder: what it was asked, what it recorded, where it can go on, and what it trained.

    config.json environment.json records.jsonl checkpoints/ final/ best/ done
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.federation import Federation
from ..core.snapshot import restore, snapshot
from ..data import FederatedData
from ..errors import ConfigError, DataError
from ..metrics.criterion import validation_score
from ..metrics.registry import canonical
from .config import DIVIDING, RunConfig, spelled
from .environment import describe_environment
from .files import DiskError, disk, drop_drafts, read_json, read_tensors, whole_folder, write_bytes, write_json, write_tensors
from .lock import folder_lock
from .outside import COPIES, code_of, outside_files, refuse_other_code
from .states import (
    MOST_FILES,
    checked_store,
    forget_states,
    load_states,
    own_tensors,
    save_best,
    save_states,
    settle_store,
)

if TYPE_CHECKING:
    from .result import Result

CHECKPOINT_SHARE = 0.1        # at most this share of the time goes into checkpoints
KEEP = 2                      # newest checkpoints kept
WRITTEN = (".", COPIES, "checkpoints", "best", "best/clients", "final", "final/clients")        # folders in which files are written


def default_folder(config: RunConfig) -> Path:
    """Same configuration and seed, same name."""
    name = "".join(ch if ch.isalnum() or ch in "+-_." else "-" for ch in config.stack().canonical)
    source = config.run.data.partition("(")[0]
    return Path("runs") / f"{name.lstrip('.-')[:60]}-{source}-{config.digest()}-seed{config.policy.seed}"


class RunFolder:
    """One run on disk. Every file is written atomically; records are appended line by line."""

    def __init__(self, path: str | Path, again: bool = False, spare: float = 0.0) -> None:
        self.path, self.again, self.spare = Path(path), again, spare        # spare: least seconds between two checkpoints
        self._last, self._cost, self._best = 0.0, 0.0, float("-inf")
        self._waiting: dict[str, Tensor] = {}                               # the best model, until the next checkpoint is written

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folder_lock(self.path))
            except DiskError:
                if self.again or not self.done:       # a finished run is only read, and so from a disk that takes no lock too
                    raise
            yield

    @property
    def done(self) -> bool:
        return (self.path / "done").is_file()

    def open(self, result: Result, config: RunConfig) -> bool:
        """Start, or go on where an earlier process stopped. False when the run is finished and only had to be read."""
        fed = result.federation
        if self.again:
            self._clear()
        known = self.path / "config.json"
        if known.is_file() and self._begun():
            self._check_same(self._stored(), result, config)
        elif not known.is_file() and any(p.name not in (".lock", ".config.json.draft", COPIES) for p in self.path.iterdir()):
            raise self._not_ours()
        else:
            if known.is_file():
                with contextlib.suppress(DataError):        # a damaged one is written anew, somebody else's is not
                    self._stored()
            for name, file in outside_files(config).items():
                write_bytes(self.path / COPIES / f"{name}.py", file.read_bytes())
            code = code_of(config)
            write_json(known, {"method": result.method, "config": result.config, "data": result.data, "places":
                               {"data_dir": config.run.data_dir, "map_data": config.run.map_data, "store": config.run.store},
                               **({"code": code} if code else {})})
        settle_store(fed, config.run.store, config.run.rounds, self.path)
        start = self.restore_newest(fed, self._recorded(fed))
        if self.done and start < read_done(self.path)["summary"]["rounds"]:
            with disk("reopen", self.path):
                (self.path / "done").unlink()      # damaged since: make the last rounds again from an older checkpoint
        if not self.done:                     # a finished run is only read
            drop_drafts(*(self.path / place for place in WRITTEN))
            self._drop_checkpoints_after(start)
        result.records.extend(self._cut_records(start))
        for record in result.records:
            self._best = max(self._best, _validation(record))
        if self.done:
            result.stopped = read_done(self.path)["stopped"]
        if self.spare:
            self._last = time.monotonic()
        return not self.done

    def keep_layout(self, config: RunConfig) -> RunConfig:
        """A run that was begun goes on with the memory layout it has, also on a machine that would choose another."""
        if config.policy.layout != "auto" or self.again or not (self.path / "config.json").is_file() or not self._begun():
            return config
        return config.replace(layout=self._stored()["config"].get("layout", "auto"))

    def _stored(self) -> dict[str, Any]:
        """What config.json says. Other programs write files of that name, and records, too."""
        stored = read_json(self.path / "config.json")
        if not isinstance(stored, dict) or not all(isinstance(stored.get(part), dict) for part in ("config", "data")):
            raise self._not_ours()
        return stored

    def _not_ours(self) -> ConfigError:
        return ConfigError(f"The folder {str(self.path)!r} holds files, but no run of ours. Choose an empty folder with --out.")

    def _begun(self) -> bool:
        """Whether there is anything to go on from. A run that stopped before its first round must not block the next try."""
        records = self.path / "records.jsonl"
        return self.done or bool(self._checkpoints()) or (records.is_file() and records.stat().st_size > 0)

    def _check_same(self, old: dict[str, Any], result: Result, config: RunConfig) -> None:
        new = json.loads(json.dumps({"config": result.config, "data": result.data}, default=list))
        # earlier versions did not say how data had been divided that a run was given; what came of it stands under "data"
        unsaid = {"config": {**dict.fromkeys(DIVIDING), "hold_out": [], "data": result.data["name"]}, "data": {}}
        # nor did they write a measure, a data set or a split in one way
        measures = {name: [canonical(m) for m in said] if isinstance(said, list) else canonical(said)
                    for name in ("criterion", "measure") if (said := old["config"].get(name))}
        old = {**old, "config": {**{k: spelled(k, v) for k, v in old["config"].items()}, **measures}}
        for part in ("config", "data"):
            for key in sorted(old[part].keys() | new[part].keys()):
                if key in unsaid[part] and old[part].get(key) == unsaid[part][key]:
                    continue
                if old[part].get(key) != new[part].get(key):
                    raise ConfigError(f"The folder {str(self.path)!r} holds a run with {key} = {old[part].get(key)!r}, not "
                                      f"{new[part].get(key)!r}. Choose another --out, or --again to run anew.")
        refuse_other_code(self.path, old.get("code", {}), config, "Choose another --out, or --again to run anew.")

    def _clear(self) -> None:
        with disk("empty", self.path):
            # `done` first, so that half a run never looks finished; `config.json` last, so that the folder stays ours
            for name in ("done", "environment.json", "records.jsonl", "checkpoints", "final", "best", "states", "measures.json", "tracking",
                         COPIES, "config.json"):
                target = self.path / name
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)

    def describe_environment(self, fed: Federation, engine: dict[str, Any]) -> None:
        """Where the run runs; written again at its end, with what the engine noted."""
        write_json(self.path / "environment.json", describe_environment(fed.device) | engine)

    # ---- records ---------------------------------------------------------------------------------------------------

    def append(self, record: dict[str, Any]) -> None:
        path = self.path / "records.jsonl"
        with disk("append to", path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _recorded(self, fed: Federation) -> int:
        """The last round up to which no record is missing; a later checkpoint would leave a gap."""
        path = self.path / "records.jsonl"
        records = read_records(path) if path.is_file() else []
        # parts of earlier versions prepared where they had nothing to ask for
        last = -1 if fed.method.using("prepare") or (records and records[0]["round"] == 0) else 0
        for record in records:
            if record["round"] != last + 1:
                break
            last += 1
        return last

    def _cut_records(self, last_round: int) -> list[dict[str, Any]]:
        """Records up to the checkpoint. Later rounds will be run again and give the same; a torn last line is dropped."""
        path = self.path / "records.jsonl"
        if not path.is_file():
            return []
        kept = [r for r in read_records(path) if r["round"] <= last_round]
        content = "".join(json.dumps(r, allow_nan=False) + "\n" for r in kept).encode()
        if content != path.read_bytes():
            write_bytes(path, content)
        return kept

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self, fed: Federation, force: bool = False) -> None:
        """Write a checkpoint unless that would take too large a share of the time."""
        start = time.monotonic()
        if not force and start - self._last < max(self._cost / CHECKPOINT_SHARE, self.spare):
            return
        self._write_waiting()             # before the checkpoint, so that going on from it finds the best model of the rounds before
        tensors, meta = snapshot(fed, clients=not fed.clients.keeps_itself)
        folder = self.path / "checkpoints" / f"round-{fed.round_number:06d}"
        with disk("write the checkpoint", folder):
            with whole_folder(folder) as draft:
                sha256 = write_tensors(draft / "state.safetensors", tensors)
                write_json(draft / "state.json", {"sha256": sha256, "meta": meta, "meta_sha256": _hash(meta),
                                                  **save_states(fed, draft, folder.name)})
            for old in self._checkpoints()[KEEP:]:
                shutil.rmtree(old, ignore_errors=True)
                forget_states(fed, old.name)
        self._last = time.monotonic()
        self._cost = self._last - start

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("round-*"), reverse=True)

    def _drop_checkpoints_after(self, round_number: int) -> None:
        """Newer ones are damaged or lack records; kept, they would push out sound ones."""
        for folder in self._checkpoints():
            if int(folder.name.removeprefix("round-")) > round_number:
                shutil.rmtree(folder, ignore_errors=True)

    def restore_newest(self, fed: Federation, at_most: int | None = None) -> int:
        """Put the newest sound checkpoint into the federation; returns its round, or −1 to start from the beginning."""
        damaged = []
        for folder in self._checkpoints():
            try:
                if at_most is not None and int(folder.name.removeprefix("round-")) > at_most:
                    raise DataError(f"The records after round {at_most} are missing.")
                about = read_json(folder / "state.json")
                if about["meta_sha256"] != _hash(about["meta"]):
                    raise DataError(f"The file {str(folder / 'state.json')!r} is damaged.")
                store = checked_store(fed, self.path, folder, about)
                restore(fed, read_tensors(folder / "state.safetensors", about["sha256"]), about["meta"])
                if store is not None:
                    load_states(fed, store, self.path, folder, about)
                return fed.round_number
            except (DataError, KeyError, TypeError) as error:
                damaged.append(str(error))
        if self.done:
            raise DataError(f"No checkpoint of the finished run in {str(self.path)!r} can be read "
                            f"({damaged[0].rstrip('.') if damaged else 'there is none'}). Run it anew with --again.")
        return -1

    # ---- what was trained ------------------------------------------------------------------------------------------

    def keep_best(self, result: Result, data: FederatedData, record: dict[str, Any]) -> None:
        """Beside the last models, those of the best validation score.

        A global model alone waits in memory for the next checkpoint: early rounds are each better than the last, and a large
        model takes as long to write as a round to train. Clients' models are written at once, since they may not fit twice.
        """
        if _validation(record) <= self._best:
            return
        self._best = _validation(record)
        if result.federation.personal:
            self._write_models("best", result, data)
        else:
            self._waiting = result.global_model

    def _write_waiting(self) -> None:
        if self._waiting:
            write_tensors(self.path / "best" / "global.safetensors", self._waiting)
            self._waiting = {}

    def _write_models(self, name: str, result: Result, data: FederatedData) -> None:
        fed = result.federation
        write_tensors(self.path / name / "global.safetensors", result.global_model)
        if fed.personal and not fed.pooled:
            if fed.size > MOST_FILES:                     # the last checkpoint has the last ones
                if name == "best":
                    save_best(fed, self.path / name)
                return
            for number, client in enumerate(data.clients):
                write_tensors(self.path / name / "clients" / f"{safe_name(client.name)}.safetensors",
                              own_tensors(fed, fed.client(number)))

    def finish(self, result: Result, data: FederatedData) -> None:
        self.checkpoint(result.federation, force=True)
        self._write_models("final", result, data)
        write_json(self.path / "done", {"stopped": result.stopped, "summary": result.summary()})


def _hash(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _validation(record: dict[str, Any]) -> float:
    score = validation_score(record)
    return float("-inf") if score is None else score


def safe_name(name: str) -> str:
    """A client's name as a file name."""
    plain = "".join(ch if ch.isalnum() or ch in "-_." else "_" for ch in name)
    return plain if plain == name and not plain.startswith(".") else f"{plain.lstrip('.')}-{zlib.crc32(name.encode()):08x}"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a run, finished or not. A last line cut off by a power failure is left out."""
    return read_lines(path, _is_record)


def read_lines(path: Path, sound: Callable[[dict[str, Any]], bool] = lambda line: True) -> list[dict[str, Any]]:
    """A file of tables in JSON, one in a line, each of which is to be `sound`."""
    out: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            table = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            table = None
        if not isinstance(table, dict) or not sound(table):
            raise DataError(f"The file {str(path)!r} is damaged in line {number}.")
        out.append(table)
    return out


def _is_record(line: dict[str, Any]) -> bool:
    """Whether what everybody reads of a record is of its kind."""
    number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    return (isinstance(line.get("round"), int) and all(number(line.get(name, 0)) for name in ("bytes_up", "bytes_down"))
            and (line.get("loss") is None or number(line["loss"])) and isinstance(line.get("measured", {}), dict)
            and all(isinstance(line.get(name) or {}, dict) for name in ("global", "personalised", "validation", "criterion", "measures")))


def read_done(folder: Path) -> dict[str, Any]:
    """What a finished run's folder says of its end."""
    done = read_json(folder / "done")
    try:
        if isinstance(done["summary"]["rounds"], int) and isinstance(done["stopped"], str):
            return done
    except (KeyError, TypeError):
        pass
    raise DataError(f"The file {str(folder / 'done')!r} is damaged. Delete it: the same command then resumes from the newest checkpoint.")
