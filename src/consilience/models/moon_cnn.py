"""MOON's simple CNN with its projection header, which LfD uses too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..options import option
from .architecture import Architecture, Need, flat_width


@dataclass(frozen=True)
class MoonCnn(Architecture):
    """Two 5×5 convolution stages, two linear layers (84 features), a two-layer header, a linear head."""

    header_features: int = option(256, "width of the header's output, which enters the head", low=1)

    name = "moon_cnn"
    example = ((3, 32, 32), 10)
    stages = ("stage1", "stage2")
    header = ("header",)

    def body(self, need: Need) -> dict[str, nn.Module]:
        maps = {"stage1": nn.Sequential(nn.Conv2d(need.sample[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
                "stage2": nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))}
        neck = nn.Sequential(nn.Flatten(), nn.Linear(flat_width(maps, need, self.name), 120), nn.ReLU(),
                             nn.Linear(120, 84), nn.ReLU())
        header = nn.Sequential(nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, self.header_features))
        return {**maps, "neck": neck, "header": header}
