"""The file behind a DiskStore: records of one size, counted references, checksums."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import DataError
from ..memory import roomy_folder

ALIGN = 64
CHECK_AT_ONCE = 2**30       # bytes of records whose checksums are compared when a checkpoint is opened; more are, one by one, when read


class Records:
    """The file of records: which are in use, by how many, and what lies in them."""

    def __init__(self, path: Path | None, template: tree.Tree) -> None:
        self.path, self.template = path, template
        self.places: list[tuple[str, int, Tensor]] = []
        at = 0
        for name, leaf in tree.paths(template):
            self.places.append((name, at, leaf))
            at += -(-leaf.numel() * leaf.element_size() // ALIGN) * ALIGN
        self.size = at
        self._file: Any = None
        self._writable = False
        self.users = np.zeros(1024, np.uint16)         # of each record: the index and the checkpoints that refer to it
        self.free: list[int] = []
        self.end = 0                                   # records from here on were never used

    def file(self, write: bool) -> Any:
        """The open file. Without a path it has no name, and is gone with the process however that ends."""
        if self._file is None or (write and not self._writable):
            self.close()
            if self.path is None:
                self._file, self._writable = tempfile.TemporaryFile(buffering=0, dir=roomy_folder()), True      # noqa: SIM115
            elif write:
                new = not self.path.exists()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file, self._writable = open(self.path, "w+b" if new else "r+b", buffering=0), True      # noqa: SIM115
                if new:
                    sync_folder(self.path.parent)
            else:
                self._file = open(self.path, "rb", buffering=0)                        # noqa: SIM115 (open as long as the store is)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._writable = None, False

    def sync(self) -> None:
        """Make what was written durable."""
        if self._writable:
            os.fsync(self._file.fileno())

    def take(self) -> int:
        record = self.free.pop() if self.free else self.end
        self.end = max(self.end, record + 1)
        if record >= len(self.users):
            self.users = np.concatenate([self.users, np.zeros_like(self.users)])
        self.users[record] = 1
        return record

    def hold(self, records: np.ndarray) -> None:
        """One more user for each of these records, which need not be known yet."""
        if len(records):
            self.end = max(self.end, int(records.max()) + 1)
            while self.end > len(self.users):
                self.users = np.concatenate([self.users, np.zeros_like(self.users)])
            np.add.at(self.users, records, 1)

    def release(self, records: np.ndarray) -> None:
        if len(records):
            np.subtract.at(self.users, records, 1)
            self.free.extend(records[self.users[records] == 0].tolist())

    def count_free(self) -> None:
        """Find all free records anew."""
        self.free = np.flatnonzero(self.users[: self.end] == 0).tolist()

    def write(self, record: int, tensors: tree.Tree) -> int:
        """Returns the checksum."""
        whole = torch.zeros(self.size, dtype=torch.uint8)
        flat = dict(tree.paths(tensors))
        for name, at, leaf in self.places:
            new = flat.pop(name, None)
            if new is None or new.shape != leaf.shape or new.dtype != leaf.dtype:
                raise DataError(f"A client's state must keep the shape it was declared with, but {name!r} is "
                                f"{'absent' if new is None else f'{tuple(new.shape)} {new.dtype}'}, not {tuple(leaf.shape)} {leaf.dtype}.")
            raw = new.detach().cpu().contiguous().view(-1)
            whole[at: at + raw.numel() * raw.element_size()] = raw.view(torch.uint8)
        if flat:
            raise DataError(f"A client's state holds what was not declared: {', '.join(sorted(flat))}.")
        content, file = memoryview(whole.numpy().data), self.file(write=True)
        file.seek(record * self.size)
        done = 0
        while done < len(content):
            done += file.write(content[done:])
        return zlib.crc32(content)

    def read(self, record: int, crc: int | None) -> tree.Tree:
        """A record's tensors, checked against the checksum where one is given."""
        whole = self._raw(record, crc)
        flat = {name: torch.empty_like(leaf).copy_(whole[at: at + leaf.numel() * leaf.element_size()].view(leaf.dtype).view(leaf.shape))
                for name, at, leaf in self.places}
        return tree.like(self.template, flat)

    def _raw(self, record: int, crc: int | None) -> Tensor:
        whole = torch.empty(self.size, dtype=torch.uint8)
        content, done = memoryview(whole.numpy().data), 0
        try:
            file = self.file(write=False)
            file.seek(record * self.size)
            while done < len(content) and (n := file.readinto(content[done:])):
                done += n
        except FileNotFoundError:
            raise DataError(f"There is no file {str(self.path)!r}, where the clients' states should lie.") from None
        if done < len(content) or (crc is not None and zlib.crc32(content) != crc):
            raise DataError(f"The file {str(self.path)!r} is damaged: a client's state does not match its checksum.")
        return whole

    def check(self, records: np.ndarray, crcs: np.ndarray) -> None:
        """Refuse a file that is too short for these records, or, where they are not too many to read them all, damaged."""
        if not len(records):
            return
        if len(records) * self.size <= CHECK_AT_ONCE:
            for record, crc in zip(records.tolist(), crcs.tolist()):
                self._raw(record, crc)
        else:
            self._raw(int(records.max()), None)


def sync_folder(path: Path) -> None:
    """Make a new file's name durable; some systems cannot open folders."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
