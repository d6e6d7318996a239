"""Drug–target pairs: SMILES and protein sequences as character numbers, and affinity as a binary label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import DataError
from ..text import CharacterDataset

# 0 pads; other characters share the last number of their alphabet.
SMILES = "#%()*+-./0123456789:=@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]abcdefghijklmnopqrstuvwxyz"
PROTEIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def encode(texts: Sequence[str], alphabet: str, length: int) -> Tensor:
    """(N, length) int64: 1 … for the characters of the alphabet, one more for all others, 0 after the end."""
    numbers = {c: i for i, c in enumerate(alphabet, 1)}
    out = torch.zeros((len(texts), length), dtype=torch.int64)
    for row, text in zip(out, texts):
        ids = [numbers.get(c, len(alphabet) + 1) for c in text[:length]]
        row[:len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return out


def pairs(name: str, drugs: Sequence[str], proteins: Sequence[str], drug: Tensor, protein: Tensor, affinity: Tensor, *,
          threshold: float, smiles: int, residues: int, drug_names: Sequence[str] = (), protein_names: Sequence[str] = (),
          test: Tensor | None = None) -> CharacterDataset:
    """x: the SMILES' numbers, then the protein's. y: 1 where the affinity constant (nM; small is tight) is under the threshold."""
    if not len(affinity):
        raise DataError(f"Data set {name!r} has no drug–target pair with a measured affinity.")
    if not bool((torch.isfinite(affinity) & (affinity >= 0)).all()):
        raise DataError(f"Data set {name!r} has affinities that are not finite and positive numbers of nM.")
    x = torch.cat([encode(drugs, SMILES, smiles)[drug], encode(proteins, PROTEIN, residues)[protein]], 1)
    return CharacterDataset(name=name, x=x, y=(affinity < threshold).long(), classes=2, class_names=("no binding", "binding"),
                            official_test=test if test is not None else torch.zeros(0, dtype=torch.int64),
                            groups={"drug": drug, "target": protein},
                            group_names={"drug": tuple(drug_names), "target": tuple(protein_names)},
                            vocabulary=2 + max(len(SMILES), len(PROTEIN)))
