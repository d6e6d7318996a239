"""A data set as its files hold it, before it is divided among clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import DataError, some


@dataclass(frozen=True)
class Dataset:
    """Samples in the order of the files. Images are uint8 (N, channels, height, width); text is int64 (N, tokens)."""

    name: str
    x: Tensor
    y: Tensor                                           # int64 labels (N,), or masks (N, height, width)
    classes: int
    class_names: tuple[str, ...] = ()
    official_test: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))   # rows of the published test set
    groups: Mapping[str, Tensor] = field(default_factory=dict)             # "domain", "writer", "subject", … -> (N,) int64
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: Tensor | None = None                         # (N,) 0 train, 1 validation, 2 test, where the publisher fixed them
    mean: tuple[float, ...] = ()                        # per channel, of values in [0, 1]; empty: not normalised
    std: tuple[float, ...] = ()
    task: str = "classification"
    feature_names: tuple[str, ...] = ()                 # of the numbers of a sample, where they have names, as the columns of a table
    sample_names: tuple[str, ...] = ()                  # of the samples, where they have names, as files
    categories: tuple[str, ...] = ()                    # columns whose values are features of 0 and 1, named column=value

    def __repr__(self) -> str:
        """A line in place of the tensors' numbers."""
        groups = f", groups {', '.join(self.groups)}" if self.groups else ""
        return f"<Dataset: {self.name}, {len(self.x):,} samples of {shape_of(self.x)}, {self.classes} classes{groups}>"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"Data set {self.name!r} has {len(self.x)} samples but {len(self.y)} labels.")
        for name, group in self.groups.items():
            if len(group) != len(self.y):
                raise DataError(f"Group {name!r} of data set {self.name!r} has {len(group)} entries for {len(self.y)} samples.")


def shape_of(x: Tensor) -> str:
    """A sample's shape for people."""
    return " × ".join(map(str, x.shape[1:])) or "one number"


def in_columns(dataset: Dataset, wanted: Sequence[str], whose: str, asked_by: str) -> Dataset:
    """Samples with these columns, by their names and in this order; others are left out. As they are where one side has no names.

    A value of a category that these samples do not have is a column of zeros; one that is not wanted is refused: it would be none.
    """
    if not wanted or not dataset.feature_names:
        return dataset
    of = lambda name: next((c for c in dataset.categories if name.startswith(f"{c}=")), None)
    agreed = {of(name) for name in wanted} - {None}
    if strange := [name for name in dataset.feature_names if of(name) in agreed and name not in wanted]:
        raise DataError(f"{whose} have {some([repr(s) for s in strange])}, a value that is not among those {asked_by}: "
                        f"{some([name for name in wanted if of(name) == of(strange[0])])}. Change it to one of them, or agree on it.")
    absent = [name for name in wanted if name not in dataset.feature_names and of(name)]
    if absent:
        zeros = dataset.x.new_zeros(len(dataset.x), len(absent))
        dataset = replace(dataset, x=torch.cat([dataset.x, zeros], 1), feature_names=(*dataset.feature_names, *absent))
    if missing := [name for name in wanted if name not in dataset.feature_names]:
        raise DataError(f"{whose} have no column {some([repr(m) for m in missing])}, which {asked_by}. Its columns: {some(wanted)}.")
    place = [dataset.feature_names.index(name) for name in wanted]
    return replace(dataset, x=dataset.x[:, place], feature_names=tuple(wanted))
