"""What every split is, and the few steps that most of them share.

A split only says who owns which rows. Its draws come from keys named after the thing they decide (a client, a class),
so that no draw depends on how many were made before it. A class is named by its first row, not by its label: where the
definition of a split does not go through the classes in label order, renaming the classes leaves the split unchanged.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import options, rng
from ...core.population import RowTable
from ...errors import ConfigError, DataError
from ..dataset import Dataset


class Assignment(NamedTuple):
    """Rows of each client (sorted), the clients' names, and the rows that nobody received."""

    rows: RowTable
    names: list[str]
    unused: Tensor


Divided = tuple[Sequence[Tensor], list[str]]         # rows per client, in any order, and the clients' names


@dataclass(frozen=True)
class Split(abc.ABC):
    """A way to divide rows of a data set among clients. Subclasses are frozen dataclasses of `option` fields."""

    name = ""
    summary = ""
    needs_labels = True                  # one label per sample: refused where y holds masks

    def __post_init__(self) -> None:
        options.check(self, f"split {self.name!r}")

    @property
    def text(self) -> str:
        """The split as it can be typed, with every setting written out; goes into a run's record."""
        return options.format_call(self.name, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def assign(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Assignment:
        """Divide `rows` of `dataset`. `clients` may be None where the split itself determines their number."""
        rows = rows.to(torch.int64).sort().values
        if not len(rows):
            raise DataError(f"Split {self.name!r} was given no rows of {dataset.name!r} to divide.")
        if clients is not None and clients < 1:
            raise ConfigError(f"The number of clients must be at least 1. Got {clients!r} instead.")
        if self.needs_labels and dataset.y.dim() != 1:
            raise ConfigError(f"Split {self.name!r} divides by the label of a sample, but {dataset.name!r} has a mask "
                              f"per sample. Use iid, quantity or by_group.")
        parts, names = self._divide(dataset, rows, clients, key)
        table = RowTable.of(parts).sorted()
        empty = (table.sizes == 0).nonzero().flatten().tolist()
        if empty:
            raise DataError(f"Split {self.text} of {dataset.name!r} leaves {len(empty)} of {len(table)} clients "
                            f"without samples (the first is {names[empty[0]]!r}). Lower the number of clients.")
        unused = rows[~torch.isin(rows, table.rows)]
        return Assignment(table, names, unused)

    @abc.abstractmethod
    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        """The split itself. `rows` is sorted and not empty."""

    def _number(self, clients: int | None) -> int:
        if clients is None:
            raise ConfigError(f"Split {self.name!r} needs the number of clients, as in clients=10.")
        return clients


def client_names(n: int) -> list[str]:
    """client0 … with as many digits as the last needs, so that names sort like numbers."""
    width = len(str(n - 1))
    return [f"client{i:0{width}d}" for i in range(n)]


def rows_by_label(dataset: Dataset, rows: Tensor) -> list[Tensor]:
    """The sorted rows of each class 0 … classes − 1; a class without samples has none."""
    labels = dataset.y[rows]
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels, minlength=dataset.classes)
    return list(rows[order].split(counts.tolist()))


def by_first_row(groups: list[Tensor]) -> list[Tensor]:
    """The groups that are not empty, in the order of their first rows: an order that labels have no part in."""
    return sorted((g for g in groups if len(g)), key=lambda g: int(g[0]))


def shuffled(rows: Tensor, key: Tensor) -> Tensor:
    """Rows of one class in random order; keyed by its first row."""
    return rows[rng.permutation(rng.key(key, "shuffle", int(rows[0])), len(rows))] if len(rows) else rows


def log_dirichlet(concentration: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The logarithm of a Dirichlet draw: with small concentrations, shares are far below the smallest float.

    A Gamma(a) number is a Gamma(a + 1) number times U^(1/a), U uniform; a Dirichlet draw is Gammas over their sum.
    """
    a = np.asarray(concentration, dtype=np.float64)
    logs = np.log(generator.standard_gamma(a + 1)) + np.log1p(-generator.random(a.shape)) / a
    return logs - np.logaddexp.reduce(logs)


def cut_points(shares: np.ndarray, n: int) -> np.ndarray:
    """How many of n go to each client: differences of int(cumulated share · n); the last takes the rest."""
    edges = (np.cumsum(shares)[:-1] * n).astype(np.int64)
    return np.diff(np.concatenate(([0], np.minimum(edges, n), [n])))


def deal(rows: Tensor, sizes: np.ndarray | list[int]) -> RowTable:
    """Consecutive pieces of `rows`, of the given sizes; what is left over is dropped."""
    ends = torch.from_numpy(np.cumsum(np.asarray(sizes, np.int64)))
    return RowTable(rows[: int(ends[-1]) if len(ends) else 0], torch.cat([ends.new_zeros(1), ends]))


def require_enough(name: str, n: int, clients: int, min_size: int) -> None:
    """Refuse at once what no draw could meet."""
    if clients * min_size > n:
        ways = [f"set min_size to at most {n // clients}"] if n >= clients else []
        ways.append(f"{'' if ways else 'set '}the number of clients to at most {n // max(min_size, 1)}" if n >= min_size else
                    f"give at least {clients * min_size} samples")
        raise DataError(f"Split {name!r} over {clients} clients with min_size={min_size} needs {clients * min_size} "
                        f"samples, but there are {n}: {' or '.join(ways)}.")


def gave_up(split: Split, tries: int, clients: int, min_size: int, best: int) -> DataError:
    """The error after the last try; `best` is the largest minimum that was seen."""
    how = f"Set min_size to at most {best}" if best > 0 else "Lower the number of clients"
    return DataError(f"Split {split.text} over {clients} clients: in none of {tries} tries did every client receive "
                     f"min_size={min_size} samples; the best try left the smallest client with {best}. "
                     f"{how}, raise alpha, or raise tries.")
