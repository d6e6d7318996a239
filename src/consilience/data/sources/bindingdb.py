"""BindingDB: measured affinities of drugs and proteins."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._pairs import pairs
from .base import Source, Wanted


@dataclass(frozen=True)
class BindingDb(Source):
    """Drug–target pairs from BindingDB's tab-separated file (BindingDB_All.tsv).

    Used are rows with a SMILES, one protein chain and a value in the column of `measure`; '<' and '>' before a number are
    dropped; a pair measured more than once has the geometric mean. A pair binds (class 1) when the value is under
    `threshold`: 30 nM of Kd (LfD does not state its rule). Samples carry the groups "drug" and "target".
    """

    measure: str = option("Kd", "which constant", choices=("Kd", "Ki", "IC50", "EC50"))
    threshold: float = option(30.0, "nM; a smaller value counts as binding", above=0.0)
    smiles: int = option(100, "characters kept of a drug", low=1)
    residues: int = option(1000, "characters kept of a protein", low=1)

    name = "bindingdb"
    title = "drug–target pairs with measured affinity"
    kind = "pairs"
    folders = ("bindingdb", "BindingDB")
    files = (Wanted("BindingDB_All.tsv", also=("bindingdb.tsv", "BindingDB_All_2D.tsv")),)
    how_to_get = "download and unpack the file BindingDB_All_<date>_tsv.zip of bindingdb.org into the folder 'bindingdb'."
    default_split = "dirichlet(alpha=0.5)"

    def read_folder(self, folder: Path) -> Dataset:
        path = self.files[0].locate(folder)
        assert path is not None
        drugs: dict[str, int] = {}
        proteins: dict[str, int] = {}
        logs: dict[tuple[int, int], list[float]] = {}
        for smiles, sequence, value in _measured(path, f"{self.measure} (nM)"):
            pair = (drugs.setdefault(smiles, len(drugs)), proteins.setdefault(sequence, len(proteins)))
            logs.setdefault(pair, []).append(math.log(value))
        if not logs:
            raise DataError(f"The file {path} has no row with a SMILES, one protein chain and a {self.measure}.")
        index = torch.tensor(list(logs))
        affinity = torch.tensor([math.exp(sum(v) / len(v)) for v in logs.values()], dtype=torch.float64)
        return pairs(self.name, list(drugs), list(proteins), index[:, 0], index[:, 1], affinity, threshold=self.threshold,
                     smiles=self.smiles, residues=self.residues)


def _measured(path: Path, column: str) -> Iterator[tuple[str, str, float]]:
    """(SMILES, sequence, value) row by row; the file has gigabytes."""
    csv.field_size_limit(1 << 24)
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            header = [" ".join(name.split()) for name in next(rows, [])]
            at = {name: i for i, name in reversed(list(enumerate(header)))}     # the first of equal names counts
            # Newer files number the chains (… Sequence 1, … Sequence 2); rows with one chain use the first.
            chain = next((i for i, n in enumerate(header) if n.startswith("BindingDB Target Chain Sequence")), None)
            many = next((i for i, n in enumerate(header) if n.startswith("Number of Protein Chains")), None)
            if "Ligand SMILES" not in at or column not in at or chain is None:
                raise DataError(f"The file {path} must have the columns 'Ligand SMILES', 'BindingDB Target Chain Sequence' "
                                f"and {column!r}, separated by tabs. Got {header[:5]} … instead.")
            last = max(at["Ligand SMILES"], at[column], chain, many or 0)
            for row in rows:
                if len(row) <= last or (many is not None and row[many].strip() not in ("", "1")):
                    continue
                smiles, sequence = row[at["Ligand SMILES"]].strip(), row[chain].strip().upper()
                try:
                    value = float(row[at[column]].strip().lstrip("<>=~ "))
                except ValueError:
                    continue
                if smiles and sequence and value > 0 and math.isfinite(value):
                    yield smiles, sequence, value
    except csv.Error as error:
        raise DataError(f"The file {path} is not a tab-separated table: {error}.") from None
