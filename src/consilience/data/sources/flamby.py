"""FLamby's natural splits, through its own package."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, DataError
from ...options import option
from ..dataset import Dataset
from ._bring import from_arrays
from .base import Source


@dataclass(frozen=True)
class Flamby(Source):
    """A classification data set of FLamby, by centre: flamby(dataset="fed_heart_disease").

    The package reads its own files (see its instructions); centres become the group "centre" and its training and test
    parts the published ones. Data sets with survival times or volumes are not classification and are refused.
    """

    dataset: str = option("", "the module's name in flamby.datasets")

    name = "flamby"
    title = "FLamby's data sets by centre, through its package"
    kind = "yours"
    needs_path = True
    how_to_get = ("install FLamby from its repository (github.com/owkin/FLamby), get its data, then write "
                  'flamby(dataset="fed_heart_disease").')
    default_split = "by_group(group='centre')"
    default_test = "published"

    def read(self, directory: str | Path | None = None) -> Dataset:
        if not self.dataset.isidentifier():
            raise ConfigError("Source 'flamby' needs the name of a data set, as in flamby(dataset=\"fed_heart_disease\").")
        try:
            module = importlib.import_module(f"flamby.datasets.{self.dataset}")
        except ModuleNotFoundError as error:
            raise DataError(f"Source 'flamby' cannot import flamby.datasets.{self.dataset} ({error}). Check the name, and install "
                            f"FLamby from its repository.") from None
        wanted = self.dataset.replace("_", "").lower()
        kind = next((v for k, v in vars(module).items() if isinstance(v, type) and k.lower().startswith(wanted)), None)
        centres = getattr(module, "NUM_CLIENTS", None)
        if kind is None or centres is None:
            raise DataError(f"flamby.datasets.{self.dataset} has no data set class Fed… with NUM_CLIENTS, so it cannot be read.")
        xs, ys, owners, roles = [], [], [], []
        for centre in range(int(centres)):
            for training in (True, False):
                for x, y in self._items(kind, centre, training):
                    xs.append(torch.as_tensor(x))
                    ys.append(torch.as_tensor(y).reshape(-1))
                    owners.append(centre)
                    roles.append(0 if training else 2)
        if not xs or any(len(y) != 1 for y in ys) or len({x.shape for x in xs}) > 1:
            raise DataError(f"flamby.datasets.{self.dataset} does not give one label per sample and samples of one shape; "
                            f"only its classification data sets are read.")
        base = from_arrays(torch.stack(xs), torch.cat(ys), owners, name=self.dataset, where=self.dataset)
        role = torch.tensor(roles)
        return dataclasses.replace(base, groups={"centre": torch.tensor(owners)}, roles=role,
                                   group_names={"centre": tuple(f"centre{i}" for i in range(int(centres)))},
                                   official_test=(role == 2).nonzero().flatten())

    def _items(self, kind: Any, centre: int, training: bool) -> list[tuple[Any, Any]]:
        try:
            part = kind(center=centre, train=training, pooled=False)
            return [part[i] for i in range(len(part))]
        except Exception as error:      # whatever the package says when its files are missing
            raise DataError(f"FLamby could not read {self.dataset}, centre {centre}: {error}") from None
