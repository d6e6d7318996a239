"""Splits along what the data itself says: the domain, the writer, the subject, the site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import rng
from ...core.population import RowTable
from ...errors import ConfigError, DataError, did_you_mean
from ...options import option
from ..dataset import Dataset
from .base import Divided, Split


@dataclass(frozen=True)
class ByGroup(Split):
    """One client per value of a group; a negative value means that the sample belongs to none."""

    name = "by_group"
    summary = "one client per domain, writer, subject or site"
    needs_labels = False

    group: str | None = option(None, "which group of the data set; may be left out where there is one only")
    min_size: int = option(1, "leave out groups with fewer samples", low=1)
    most: int | None = option(None, "use this many groups only", low=1)
    choose: str = option("drawn", "which groups, where `most` leaves some out", choices=("drawn", "largest", "first"))

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        group = find_group(dataset, self.group, self.name)
        values, counts = _present(dataset.groups[group][rows])
        values, counts = values[counts >= self.min_size], counts[counts >= self.min_size]
        if not len(values):
            raise DataError(f"No {group} of {dataset.name!r} has min_size={self.min_size} samples. Lower min_size.")
        if self.most is not None and self.most > len(values):
            raise ConfigError(f"Split 'by_group' was asked for most={self.most}, but {len(values)} values of {group!r} "
                              f"in {dataset.name!r} have {self.min_size} samples. Lower most or min_size.")
        if self.most is not None and self.most < len(values):
            order = {"drawn": rng.permutation(rng.key(key, "groups"), len(values)),
                     "largest": counts.argsort(descending=True, stable=True),
                     "first": torch.arange(len(values))}[self.choose]
            values = values[order[: self.most].sort().values]
        if clients is not None and clients != len(values):
            few = f", or write by_group(most={clients}) to use {clients} of them" if clients < len(values) else ""
            raise ConfigError(f"Split 'by_group' makes {len(values)} clients from the {group!r} of {dataset.name!r}, but "
                              f"clients={clients} was asked for. Leave clients out{few}.")
        names = [group_name(dataset, group, int(v)) for v in values]
        return rows_by_value(dataset.groups[group][rows], rows, values), names


@dataclass(frozen=True)
class DomainHalves(Split):
    """Two clients per domain: labels up to `cut`, and those above it (FedBR's PACS: 0–3 and 4–6, eight clients)."""

    name = "domain_halves"
    summary = "two clients per domain, each with half of the classes"

    group: str | None = option("domain", "which group of the data set")
    cut: int | None = option(None, "the last label of the first half; classes // 2 when left out", low=0)

    def _divide(self, dataset: Dataset, rows: Tensor, clients: int | None, key: Tensor) -> Divided:
        group = find_group(dataset, self.group, self.name)
        cut = dataset.classes // 2 if self.cut is None else self.cut
        if cut >= dataset.classes - 1:
            raise ConfigError(f"Split 'domain_halves' with cut={cut} leaves no class for the second half: "
                              f"{dataset.name!r} has {dataset.classes} classes. Set cut to at most {dataset.classes - 2}.")
        values, _ = _present(dataset.groups[group][rows])
        if clients is not None and clients != 2 * len(values):
            raise ConfigError(f"Split 'domain_halves' makes {2 * len(values)} clients, two for each of {len(values)} values "
                              f"of {group!r}, but clients={clients} was asked for. Leave clients out.")
        parts, names = [], []
        for value, members in zip(values, rows_by_value(dataset.groups[group][rows], rows, values)):
            first = dataset.y[members] <= cut
            for half, label in ((members[first], f"0-{cut}"), (members[~first], f"{cut + 1}-{dataset.classes - 1}")):
                parts.append(half)
                names.append(f"{group_name(dataset, group, int(value))}_{label}")
        return parts, names


def find_group(dataset: Dataset, group: str | None, split: str) -> str:
    """The group that is meant, or an error that names those there are."""
    if not dataset.groups:
        raise ConfigError(f"Split {split!r} needs groups (domains, writers, …), but {dataset.name!r} has none.")
    if group is None:
        if len(dataset.groups) > 1:
            raise ConfigError(f"{dataset.name!r} has the groups {', '.join(sorted(dataset.groups))}: say which, as in "
                              f"{split}(group={sorted(dataset.groups)[0]!r}).")
        return next(iter(dataset.groups))
    if group not in dataset.groups:
        raise ConfigError(f"{dataset.name!r} has no group {group!r}.{did_you_mean(group, dataset.groups)}")
    return group


def group_name(dataset: Dataset, group: str, value: int) -> str:
    names = dataset.group_names.get(group, ())
    return names[value] if value < len(names) else f"{group}{value}"


def rows_by_value(of_rows: Tensor, rows: Tensor, values: Tensor) -> RowTable:
    """Rows for each of the sorted values, in one pass: there may be thousands of writers."""
    chosen = torch.isin(of_rows, values)
    place, rows = torch.searchsorted(values, of_rows[chosen]), rows[chosen]
    order = place.argsort(stable=True)
    return RowTable.grouped(rows[order], place[order], len(values))


def _present(of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The values that occur, sorted, and how often."""
    values, counts = of_rows.unique(return_counts=True)
    return values[values >= 0], counts[values >= 0]
