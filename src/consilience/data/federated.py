"""A data set divided among clients: one tensor of samples, and rows of it for each client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError

# (x, y, key) -> (x, y) for a batch. With a key: as in training, drawing from it; with None: as in evaluation.
# Pure and free of host synchronisation, so that it can run inside a captured step.
Transform = Callable[[Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


def as_float(x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """uint8 to [0, 1]; anything else as it is."""
    return (x.float() / 255 if x.dtype == torch.uint8 else x), y


class ClientRows(NamedTuple):
    """Which samples a client owns. `val` and `test` may be empty."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor


def no_rows() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class FederatedData:
    """Samples and who owns them. Clients are numbered by their place in `clients`; keys are drawn from that number."""

    name: str
    x: Tensor
    y: Tensor
    classes: int
    clients: tuple[ClientRows, ...]
    test: Tensor = field(default_factory=no_rows)      # rows of a test set that belongs to no client
    transform: Transform = as_float
    description: dict[str, Any] = field(default_factory=dict)   # source, split, shifts; goes into the run's record
    held_out: tuple[ClientRows, ...] = ()              # clients that are scored but never trained on
    task: str = "classification"                       # or "segmentation": y holds a mask per sample

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError(f"Data set {self.name!r} has no clients.")
        if len(self.x) != len(self.y):
            raise DataError(f"Data set {self.name!r} has {len(self.x)} samples but {len(self.y)} labels.")
        names = [c.name for c in self.clients]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise DataError(f"Data set {self.name!r} has two clients named {twice!r}.")
        if len(self.y) and (int(self.y.min()) < 0 or int(self.y.max()) >= self.classes):
            raise DataError(f"Labels of {self.name!r} must be 0 to {self.classes - 1}. "
                            f"Got {int(self.y.min())} to {int(self.y.max())} instead.")

    @property
    def population(self) -> int:
        return len(self.clients)

    def split_hash(self) -> str:
        """A hash of who owns which rows; equal splits have equal hashes on every machine."""
        digest = hashlib.sha256()
        for client in (*self.clients, *self.held_out):
            digest.update(client.name.encode() + b"\0")
            for rows in (client.train, client.val, client.test):
                digest.update(len(rows).to_bytes(8, "little") + rows.to(torch.int64).numpy().astype("<i8").tobytes())
        digest.update(self.test.to(torch.int64).numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]
