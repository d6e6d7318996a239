"""A data set divided among clients: one tensor of samples, and rows of it for each client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ..core.population import RowTable
from ..errors import DataError
from .dataset import shape_of

# (x, y, key) -> (x, y) for a batch. With a key: as in training, drawing from it; with None: as in evaluation.
# Pure and free of host synchronisation, so that it can run inside a captured step.
Transform = Callable[[Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


def as_float(x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """uint8 to [0, 1]; anything else as it is."""
    return (x.float() / 255 if x.dtype == torch.uint8 else x), y


as_float.random = False          # type: ignore[attr-defined]  # it draws nothing, so a step makes no key for it


class ClientRows(NamedTuple):
    """Which samples a client owns. `val` and `test` may be empty."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor


def no_rows() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


class ClientTable(Sequence[ClientRows]):
    """Clients by number. All rows lie in three tables, so that 100,000 clients are no more objects than ten."""

    def __init__(self, names: Sequence[str], train: RowTable, val: RowTable, test: RowTable) -> None:
        self.names, self.train, self.val, self.test = tuple(names), train, val, test

    @classmethod
    def of(cls, clients: Iterable[ClientRows]) -> ClientTable:
        if isinstance(clients, ClientTable):
            return clients
        each = list(clients)
        return cls([c.name for c in each], *(RowTable.of([getattr(c, part) for c in each]) for part in ("train", "val", "test")))

    @property
    def parts(self) -> tuple[RowTable, RowTable, RowTable]:
        return self.train, self.val, self.test

    def everything(self) -> RowTable:
        """All rows of every client: those to train on first, then validation, then test."""
        rows, owner = torch.cat([t.rows for t in self.parts]), torch.cat([t.owner for t in self.parts])
        order = owner.argsort(stable=True)
        return RowTable.grouped(rows[order], owner[order], len(self))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> ClientRows: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ClientRows, ...]: ...
    def __getitem__(self, number: int | slice) -> ClientRows | tuple[ClientRows, ...]:
        if isinstance(number, slice):
            return tuple(self[i] for i in range(*number.indices(len(self))))
        return ClientRows(self.names[number], self.train[number], self.val[number], self.test[number])


@dataclass(frozen=True)
class FederatedData:
    """Samples and who owns them. Clients are numbered by their place in `clients`; keys are drawn from that number."""

    name: str
    x: Tensor
    y: Tensor
    classes: int
    clients: Sequence[ClientRows]                      # becomes a ClientTable
    test: Tensor = field(default_factory=no_rows)      # rows of a test set that belongs to no client
    transform: Transform = as_float
    description: dict[str, Any] = field(default_factory=dict)   # source, split, shifts; goes into the run's record
    held_out: tuple[ClientRows, ...] = ()              # clients that are scored but never trained on
    task: str = "classification"                       # or "segmentation": y holds a mask per sample
    feature_names: tuple[str, ...] = ()                # of the numbers of a sample, where they have names

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", ClientTable.of(self.clients))
        if not self.clients:
            raise DataError(f"Data set {self.name!r} has no clients.")
        if len(self.x) != len(self.y):
            raise DataError(f"Data set {self.name!r} has {len(self.x)} samples but {len(self.y)} labels.")
        names = self.table.names
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise DataError(f"Data set {self.name!r} has two clients named {twice!r}.")
        if len(self.y) and (int(self.y.min()) < 0 or int(self.y.max()) >= self.classes):
            raise DataError(f"Labels of {self.name!r} must be 0 to {self.classes - 1}. "
                            f"Got {int(self.y.min())} to {int(self.y.max())} instead.")

    def __repr__(self) -> str:
        """A line in place of the tensors' numbers."""
        parts = [f"{len(t.rows):,} {part}" for part, t in zip(("train", "validation", "test"), self.table.parts) if len(t.rows)]
        own = f", {len(self.test):,} test samples of no client" if len(self.test) else ""
        out = f", {len(self.held_out)} more held out" if self.held_out else ""
        split = f" by {self.description['split']}" if self.description.get("split") else ""
        return (f"<FederatedData: {self.name}, {len(self.x):,} samples of {shape_of(self.x)}, {self.classes} classes; "
                f"{self.population} clients{split}{out}: {', '.join(parts)}{own}>")

    @property
    def asked(self) -> Mapping[str, Any] | None:
        """What `load` was asked for, by the names of a run's settings, where it can read and divide the data again. No field, so that a
        changed copy has none: it is not what `load` would give."""
        return self.__dict__.get("_asked")

    @property
    def population(self) -> int:
        return len(self.clients)

    @property
    def held_out_rows(self) -> list[Tensor]:
        """What each client held out is scored on: its test rows, or all it has."""
        return [c.test if len(c.test) else torch.cat([c.train, c.val]) for c in self.held_out]

    @property
    def table(self) -> ClientTable:
        assert isinstance(self.clients, ClientTable)
        return self.clients

    def split_hash(self) -> str:
        """A hash of who owns which rows; equal splits have equal hashes on every machine."""
        return self._split_hash

    @cached_property
    def _split_hash(self) -> str:
        digest = hashlib.sha256()
        for table in (self.table, ClientTable.of(self.held_out)):
            parts = [(t.rows.to(torch.int64).numpy().astype("<i8", copy=False), t.starts.tolist()) for t in table.parts]
            for number, name in enumerate(table.names):
                digest.update(name.encode() + b"\0")
                for rows, starts in parts:
                    start, end = starts[number], starts[number + 1]
                    digest.update((end - start).to_bytes(8, "little") + rows[start:end].tobytes())
        digest.update(self.test.to(torch.int64).numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]
