"""The samples a federation trains on, as tensors and rows; made from any data set by the layer above."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from .task import Task, task_named


class RowTable(Sequence[Tensor]):
    """Rows of every client in two tensors, so that 100,000 clients are no more objects than ten.

    Client i owns rows[starts[i]: starts[i + 1]]. Both tensors may be memory-mapped.
    """

    def __init__(self, rows: Tensor, starts: Tensor) -> None:
        self.rows, self.starts = rows, starts

    @classmethod
    def of(cls, rows: Iterable[Tensor]) -> RowTable:
        if isinstance(rows, RowTable):
            return rows
        each = list(rows)
        sizes = torch.tensor([0, *(len(r) for r in each)])
        return cls(torch.cat(each) if each else torch.zeros(0, dtype=torch.int64), sizes.cumsum(0))

    @classmethod
    def grouped(cls, rows: Tensor, owner: Tensor, clients: int) -> RowTable:
        """From rows that stand in the order of their owners."""
        counts = torch.bincount(owner, minlength=clients)
        return cls(rows, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    @property
    def sizes(self) -> Tensor:
        return self.starts.diff()

    @property
    def owner(self) -> Tensor:
        """Whose each row is."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def sorted(self) -> RowTable:
        """With every client's rows in ascending order."""
        order = np.lexsort((self.rows.numpy(), self.owner.numpy()))
        return RowTable(self.rows[torch.from_numpy(order)], self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, number: int) -> Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> list[Tensor]: ...
    def __getitem__(self, number: int | slice) -> Tensor | list[Tensor]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"There are {len(self)} clients, no number {number}.")
        start, end = self.starts[number % len(self):][:2].tolist()
        return self.rows[start:end]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class Population:
    """All samples, and the training rows of each client. Clients are numbered from 0; keys are drawn from the numbers.

    `x` may be memory-mapped (torch.from_file): only the rows of a batch are read.
    """

    x: Tensor
    y: Tensor
    rows: Sequence[Tensor]                         # becomes a RowTable
    classes: int
    transform: Callable[..., Any]                  # (x, y, key or None) -> (x, y); see consilience.data.Transform
    names: Sequence[str] = ()
    proxy: Tensor | None = None                    # public samples that belong to no client
    task: Task = field(default_factory=lambda: task_named("classification"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", RowTable.of(self.rows))

    @property
    def table(self) -> RowTable:
        assert isinstance(self.rows, RowTable)
        return self.rows

    def glimpse(self, device: torch.device) -> Tensor:
        """What a model receives, two samples of it: as many as normalisation needs."""
        rows = self.table.rows[:2]
        x, _ = self.transform(self.x[rows].to(device), self.y[rows].to(device), None)
        return torch.cat([x, x])[:2]
