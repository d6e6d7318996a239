"""LeNet-5 with ReLU and max-pooling, which FedFA trains on EMNIST by writer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .architecture import Need, Projected, flat_width


@dataclass(frozen=True)
class Lenet5(Projected):
    """Two 5×5 convolution stages (6 and 16 channels), linear layers of 120 and 84, a linear head.

    Images of less than 32 pixels are padded by 2 in the first convolution, so that 28 pixels give LeNet's 400 numbers.
    """

    name = "lenet5"
    example = ((1, 28, 28), 62)
    stages = ("stage1", "stage2")

    def body(self, need: Need) -> dict[str, nn.Module]:
        padding = 2 if min(need.sample[1:], default=0) < 32 else 0
        maps = {"stage1": nn.Sequential(nn.Conv2d(need.sample[0], 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
                "stage2": nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))}
        neck = nn.Sequential(nn.Flatten(), nn.Linear(flat_width(maps, need, self.name), 120), nn.ReLU(),
                             nn.Linear(120, 84), nn.ReLU())
        return {**maps, "neck": neck}
