"""The 4-layer CNN of FedAvg, as PFLlib and DBE train it on images of 28, 32 and 64 pixels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .architecture import Need, Projected, flat_width


@dataclass(frozen=True)
class FedavgCnn(Projected):
    """Two 5×5 convolution stages (32 and 64 channels), 512 features, a linear head. No BatchNorm."""

    name = "fedavg_cnn"
    example = ((1, 28, 28), 10)
    stages = ("stage1", "stage2")

    def body(self, need: Need) -> dict[str, nn.Module]:
        maps = {"stage1": nn.Sequential(nn.Conv2d(need.sample[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
                "stage2": nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2))}
        neck = nn.Sequential(nn.Flatten(), nn.Linear(flat_width(maps, need, self.name), 512), nn.ReLU())
        return {**maps, "neck": neck}
