"""Clients' states on disk: memory holds those of a round, not those of the population.

All states of a run have the same shapes, so a state is one record of a fixed size in one file. A record is never overwritten
while anything refers to it: a new state goes to a free record, and only when the whole round is committed does the index
follow. A checkpoint is the index at that moment; records it refers to stay until the checkpoint is forgotten. So neither a
broken round nor a power cut loses what was saved, and a checkpoint writes no state that did not change.

Records are read and written by plain file calls rather than through a mapping: the system caches both alike, but a full disk
or a file cut short is then an error that can be told, where a mapping would end the process. The file is opened for writing
when something is written, so that a run on a read-only disk can still be used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.client import ClientState
from ..core.store import ClientStore, StoreFactory
from ..errors import ConsilienceError, DataError
from ._records import Records, sync_folder

NOTHING, FRESH = -1, -2            # in place of a record: never visited; visited, but its tensors are still the fresh ones
_ENTRY = np.dtype([("record", "<i8"), ("seen", "<i8"), ("own_round", "<i8"), ("crc", "<u4"), ("first", "u1"), ("checked", "u1")])
FILE, INDEX = "states.bin", "clients.npz"


class DiskStore(ClientStore):
    """States in a file of a folder, or without one in a file without a name. `keeps_itself`: checkpoints call `save`, `load` and
    `forget` in place of a snapshot.
    """

    keeps_itself = True

    def __init__(self, fresh: ClientState, folder: Path | None = None) -> None:
        super().__init__(fresh)
        self.folder = folder
        self._records = Records(None if folder is None else folder / FILE, fresh.tensors)
        self._index = self._empty(1024)
        self._saved: dict[str, np.ndarray] = {}        # checkpoint -> the records it refers to

    @classmethod
    def inside(cls, folder: str | Path | None = None) -> StoreFactory:
        """A factory of stores in this folder; without one, in a temporary file that goes with the store."""
        return lambda fresh: cls(fresh, Path(folder) if folder is not None else None)

    @property
    def record_bytes(self) -> int:
        return self._records.size

    @staticmethod
    def _empty(size: int) -> np.ndarray:
        index = np.zeros(size, _ENTRY)
        index["record"] = NOTHING
        return index

    def _room_for(self, number: int) -> None:
        while number >= len(self._index):
            self._index = np.concatenate([self._index, self._empty(len(self._index))])

    # ---- reading and committing ------------------------------------------------------------------------------------

    def _read(self, number: int) -> ClientState:
        entry = self._index[number] if number < len(self._index) else None
        if entry is None or entry["record"] == NOTHING:
            return self.fresh
        tensors = self.fresh.tensors
        if entry["record"] != FRESH:
            tensors = self._records.read(int(entry["record"]), None if entry["checked"] else int(entry["crc"]))
            self._index["checked"][number] = 1
        return ClientState(tensors, bool(entry["first"]), int(entry["seen"]), int(entry["own_round"]))

    def _write(self, states: Mapping[int, ClientState]) -> None:
        new: dict[int, tuple[int, int]] = {}
        try:
            for number, state in states.items():
                if state.tensors is self.fresh.tensors or not self._records.size:
                    new[number] = FRESH, 0
                else:
                    record = self._records.take()
                    new[number] = record, 0
                    new[number] = record, self._records.write(record, state.tensors)
        except BaseException as error:
            self._records.release(np.array([r for r, _ in new.values() if r >= 0], np.int64))
            if isinstance(error, OSError):
                raise _refused(error, self._records.path) from error
            raise
        self._room_for(max(states, default=0))
        old = np.array([self._index["record"][i] for i in states if self._index["record"][i] >= 0], np.int64)
        for number, (record, crc) in new.items():
            state = states[number]
            self._index[number] = record, state.seen, state.own_round, crc, state.first, 1
        self._records.release(old)

    def _numbers(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._index["record"] != NOTHING).tolist())

    def _forget(self) -> None:
        self._records.release(self._held(self._index))
        self._index = self._empty(1024)

    @staticmethod
    def _held(index: np.ndarray) -> np.ndarray:
        return index["record"][index["record"] >= 0]

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: Path, name: str) -> dict[str, Any]:
        """Make the committed states durable and write their index into a checkpoint's folder.

        `name` stands for the checkpoint in `forget`. What comes back goes into the checkpoint's description, for `load`.
        """
        self._records.sync()
        visited = np.flatnonzero(self._index["record"] != NOTHING)
        out = io.BytesIO()
        np.savez(out, numbers=visited, entries=self._index[visited], record=np.int64(self._records.size))
        content, draft = out.getvalue(), folder / f".{INDEX}.draft"
        folder.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / INDEX)
        sync_folder(folder)
        self.forget(name)
        self._saved[name] = self._held(self._index).copy()
        self._records.hold(self._saved[name])
        return {"file": INDEX, "sha256": hashlib.sha256(content).hexdigest()}

    def check(self, folder: Path, about: Mapping[str, Any] | None) -> None:
        """Refuse a checkpoint that is damaged or not of this run. Nothing changes."""
        index = self._read_index(folder, about)
        held = index[index["record"] >= 0]
        self._records.check(held["record"], held["crc"])

    def load(self, folder: Path, about: Mapping[str, Any] | None, name: str, others: Sequence[tuple[str, Path]] = ()) -> None:
        """Go back to a checkpoint. `others` are the checkpoints that stay on disk beside it, whose records are kept."""
        index = self._read_index(folder, about)
        self._records.users[:] = 0
        self._records.end, self._saved, self._pending = 0, {}, {}
        self._index = index
        self._records.hold(self._held(index))
        for other, path in [(name, folder), *others]:
            try:
                self._saved[other] = self._held(self._read_index(path, None)).copy()
            except DataError:
                continue                               # damaged: nobody will go back to it
            self._records.hold(self._saved[other])
        self._records.count_free()

    def _read_index(self, folder: Path, about: Mapping[str, Any] | None) -> np.ndarray:
        path = folder / INDEX
        try:
            content = path.read_bytes()
            if about is not None and hashlib.sha256(content).hexdigest() != about["sha256"]:
                raise DataError(f"The file {str(path)!r} is damaged: its contents do not match the recorded hash.")
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                numbers, entries, record = stored["numbers"], stored["entries"], int(stored["record"])
        except FileNotFoundError:
            raise DataError(f"There is no file {str(path)!r}.") from None
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"The file {str(path)!r} is damaged: {error}.") from None
        if record != self._records.size:
            raise DataError(f"The checkpoint in {str(folder)!r} does not fit this run: a client's state takes {record} bytes "
                            f"there and {self._records.size} here.")
        size = 1024
        while len(numbers) and size <= int(numbers.max()):
            size *= 2
        index = self._empty(size)
        index[numbers] = entries
        index["checked"] = 0
        return index

    def forget(self, name: str) -> None:
        """The checkpoint is deleted: records that only it referred to are free."""
        if name in self._saved:
            self._records.release(self._saved.pop(name))

    def close(self) -> None:
        """Let go of the file; the next read or write opens it again. A file without a name is gone."""
        self._records.close()


class _DiskFull(ConsilienceError):
    exit_code = 4


def _refused(error: OSError, path: Path | None) -> ConsilienceError:
    what = "The disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror or error}"
    where = repr(str(path)) if path is not None else "a temporary file"
    return _DiskFull(f"Cannot keep the clients' states in {where}: {what}. The round was undone and what was saved before is "
                     "intact; free some space or choose another folder, then run the same command again.")
