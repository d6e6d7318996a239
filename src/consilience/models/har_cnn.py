"""The CNN for human activity from inertial signals, as PFLlib and DBE train it on UCI-HAR."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..options import option
from .architecture import Need, Projected, flat_width


@dataclass(frozen=True)
class HarCnn(Projected):
    """Two convolution stages of width 9 along time, then linear layers of 1024 and 512.

    PFLlib calls all three linear layers the head, so DBE acts on the flattened maps (1664 numbers): `head_kind='mlp'`.
    `head_kind='linear'` has the same layers with the last one as the head.
    """

    head_kind: str = option("mlp", "what is called the head: all linear layers, or the last", choices=("mlp", "linear"))

    name = "har_cnn"
    example = ((9, 1, 128), 6)
    stages = ("stage1", "stage2")

    def body(self, need: Need) -> dict[str, nn.Module]:
        maps = {"stage1": _stage(need.sample[0], 32), "stage2": _stage(32, 64)}
        body = {**maps, "flatten": nn.Flatten()}
        if self.head_kind == "linear":
            body["neck"] = nn.Sequential(*_layers(flat_width(maps, need, self.name)))
        return body

    def head(self, width: int, classes: int) -> nn.Module:
        if self.head_kind == "linear":
            return nn.Linear(width, classes)
        return nn.Sequential(*_layers(width), nn.Linear(512, classes))


def _stage(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, (1, 9)), nn.ReLU(), nn.MaxPool2d((1, 2), stride=2))


def _layers(width: int) -> list[nn.Module]:
    return [nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU()]
