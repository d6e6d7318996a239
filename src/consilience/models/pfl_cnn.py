"""The CNN of pfl-research's CIFAR-10 benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..options import option
from .architecture import Need, Projected, flat_width


@dataclass(frozen=True)
class PflCnn(Projected):
    """Two 3×3 convolutions (32 and 64 channels), one pooling, 128 features, a linear head; dropout before and after the features."""

    map_dropout: float = option(0.25, "dropout of the pooled maps", low=0, below=1)
    dropout: float = option(0.5, "dropout of the features", low=0, below=1)

    name = "pfl_cnn"
    example = ((3, 32, 32), 10)
    stages = ("stage1", "stage2")

    def body(self, need: Need) -> dict[str, nn.Module]:
        maps = {"stage1": nn.Sequential(nn.Conv2d(need.sample[0], 32, 3), nn.ReLU()),
                "stage2": nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))}
        neck = nn.Sequential(nn.Dropout(self.map_dropout), nn.Flatten(), nn.Linear(flat_width(maps, need, self.name), 128), nn.ReLU(),
                             nn.Dropout(self.dropout))
        return {**maps, "neck": neck}

    def initialise(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)
