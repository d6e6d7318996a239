"""A small model for pairs of a drug and a protein, both as text: one character CNN for each, joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.layout import Layout
from ..errors import ConfigError
from ..options import option
from .architecture import Architecture, Built, Need


class CharacterCnn(nn.Module):
    """Characters from `start` to `stop` of each sample: embedding, three 1-D convolutions, maximum over positions."""

    def __init__(self, start: int, stop: int, vocabulary: int, embedding: int, filters: int,
                 kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        layers: list[nn.Module] = []
        inside = embedding
        for number, kernel in enumerate(kernels, 1):
            layers += [nn.Conv1d(inside, filters * number, kernel, padding=kernel // 2), nn.ReLU()]
            inside = filters * number
        self.convolutions = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        characters = self.embedding(x[:, self.start:self.stop])
        return self.convolutions(characters.transpose(1, 2)).amax(2)


class DrugTargetModule(nn.Module):
    def __init__(self, drug: CharacterCnn, protein: CharacterCnn, neck: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.drug, self.protein, self.neck, self.head = drug, protein, neck, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(torch.cat([self.drug(x), self.protein(x)], 1)))


@dataclass(frozen=True)
class DrugTarget(Architecture):
    """A sample is one row of whole numbers: the drug's SMILES characters, then the protein's; 0 is padding.

    Kernels grow as in DeepDTA (4, 6, 8 and 4, 8, 12); the rest is smaller. LfD names no model for BindingDB.
    """

    drug_length: int = option(100, "characters of a sample that belong to the drug; the rest is the protein", low=1)
    embedding: int = option(64, "width of a character's embedding", low=1)
    filters: int = option(32, "filters of the first convolution; the next have twice and thrice as many", low=1)
    hidden: tuple[int, ...] = option((256, 128), "widths of the two layers that join the branches", low=1)
    dropout: float = option(0.1, "dropout after the first joining layer", low=0, below=1)

    name = "drug_target"
    example = ((1100,), 2)
    vocabulary = 79                         # padding, the characters of SMILES, and one for all others

    def build(self, need: Need) -> Built:
        if not need.vocabulary or len(need.sample) != 1:
            raise ConfigError("Model 'drug_target' needs samples that are one row of whole numbers and a vocabulary. "
                              f"Got samples of shape {need.sample} and vocabulary {need.vocabulary} instead.")
        length = need.sample[0]
        if self.drug_length >= length:
            raise ConfigError(f"The 'drug_length' option of model 'drug_target' must be below the {length} characters "
                              f"of a sample, which hold the drug and the protein. Got {self.drug_length} instead.")
        if len(self.hidden) != 2:
            raise ConfigError(f"The 'hidden' option of model 'drug_target' must be two widths. "
                              f"Got {self.hidden} instead.")
        drug = CharacterCnn(0, self.drug_length, need.vocabulary, self.embedding, self.filters, (4, 6, 8))
        protein = CharacterCnn(self.drug_length, length, need.vocabulary, self.embedding, self.filters, (4, 8, 12))
        a, b = self.hidden
        neck = nn.Sequential(nn.Linear(6 * self.filters, a), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(a, b),
                             nn.ReLU())
        module = DrugTargetModule(drug, protein, neck, nn.Linear(b, need.classes))
        return Built(module, Layout(extractor=("drug", "protein", "neck")))
