"""A small CNN for scikit-learn's digits: everything a method may ask for, in a model that trains in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..options import option
from .architecture import Architecture, Need, flat_width


@dataclass(frozen=True)
class DigitsCnn(Architecture):
    """Two convolution stages with BatchNorm, a neck, a two-layer header. Maps are 4×4 and 2×2 on 8×8 images."""

    width: int = option(16, "channels of the first stage; the second has twice as many", low=1)
    features: int = option(64, "width of the extractor's output", low=1)
    header_features: int = option(32, "width of the header's output, which enters the head", low=1)

    name = "digits_cnn"
    example = ((1, 8, 8), 10)
    stages = ("stage1", "stage2")
    header = ("header",)

    def body(self, need: Need) -> dict[str, nn.Module]:
        w, f = self.width, self.features
        maps = {"stage1": _stage(need.sample[0], w), "stage2": _stage(w, 2 * w)}
        neck = nn.Sequential(nn.Flatten(), nn.Linear(flat_width(maps, need, self.name), f), nn.ReLU())
        header = nn.Sequential(nn.Linear(f, f), nn.ReLU(), nn.Linear(f, self.header_features))
        return {**maps, "neck": neck, "header": header}


def _stage(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))
