"""DAVIS: how tightly 68 drugs bind 442 kinases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._files import read_arrays
from ._pairs import pairs
from .base import Source, Wanted


@dataclass(frozen=True)
class Davis(Source):
    """30,056 drug–kinase pairs, from davis.npz: Y (Kd in nM), smiles, proteins, test_fold; plain arrays.

    A pair binds (class 1) when its Kd is under `threshold` (30 nM: about 5 % of the pairs). The published
    test fold of DeepDTA is the test set. Samples carry the groups "drug" and "target".
    """

    threshold: float = option(30.0, "nM; a smaller Kd counts as binding", above=0.0)
    smiles: int = option(100, "characters kept of a drug", low=1)
    residues: int = option(1000, "characters kept of a protein", low=1)

    name = "davis"
    title = "30,056 drug–kinase pairs (68 × 442) with Kd"
    kind = "pairs"
    folders = ("davis", "DAVIS")
    files = (Wanted("davis.npz"),)
    how_to_get = ("save DeepDTA's DAVIS data as davis.npz, with arrays Y (68, 442), smiles, proteins and test_fold, in the folder "
                  "'davis'.")
    default_split = "dirichlet(alpha=0.5)"

    def read_folder(self, folder: Path) -> Dataset:
        path = folder / "davis.npz"
        arrays = read_arrays(path)
        missing = [k for k in ("Y", "smiles", "proteins") if k not in arrays]
        if missing:
            raise DataError(f"The file {path} must hold the arrays Y, smiles and proteins. It lacks {', '.join(missing)}.")
        affinity = torch.from_numpy(arrays["Y"]).double()
        drugs, proteins = arrays["smiles"].tolist(), arrays["proteins"].tolist()
        if affinity.shape != (len(drugs), len(proteins)):
            raise DataError(f"Y in {path} must be {len(drugs)} × {len(proteins)}, drugs by proteins. "
                            f"Got {tuple(affinity.shape)} instead.")
        row = torch.arange(affinity.numel())
        test = torch.from_numpy(arrays["test_fold"]).long().sort().values if "test_fold" in arrays else None
        if test is not None and len(test) and int(test.max()) >= len(row):
            raise DataError(f"test_fold in {path} names pair {int(test.max())}, but there are {len(row)}.")
        return pairs(self.name, drugs, proteins, row // len(proteins), row % len(proteins), affinity.flatten(),
                     threshold=self.threshold, smiles=self.smiles, residues=self.residues, test=test,
                     drug_names=arrays["drug_ids"].tolist() if "drug_ids" in arrays else (),
                     protein_names=arrays["protein_ids"].tolist() if "protein_ids" in arrays else ())
