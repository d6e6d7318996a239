"""U-Net for segmentation, as FedFA trains it on ProstateMRI (its Tables 14 and 15)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.layout import Layout
from ..errors import ConfigError
from ..options import option
from .architecture import Architecture, Built, Need


class UNetModule(nn.Module):
    """Four encoder blocks with pools, a bottleneck, four decoder blocks with skip connections, a 1×1 head.

    FFA acts on the pools and on the bottleneck. Skip connections leave before the pools, so they stay un-augmented.
    """

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        inside = channels
        for level in range(1, 5):
            outside = width * 2 ** (level - 1)
            self.add_module(f"encoder{level}", _block(inside, outside))
            self.add_module(f"pool{level}", nn.MaxPool2d(2))
            inside = outside
        self.bottleneck = _block(inside, 2 * inside)
        for level in range(4, 0, -1):
            outside = width * 2 ** (level - 1)
            self.add_module(f"up{level}", nn.ConvTranspose2d(2 * outside, outside, 2, stride=2))
            self.add_module(f"decoder{level}", _block(2 * outside, outside))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in range(1, 5):
            skip = self.get_submodule(f"encoder{level}")(x)
            skips.append(skip)
            x = self.get_submodule(f"pool{level}")(skip)
        x = self.bottleneck(x)
        for level in range(4, 0, -1):
            x = torch.cat([self.get_submodule(f"up{level}")(x), skips[level - 1]], 1)
            x = self.get_submodule(f"decoder{level}")(x)
        return self.head(x)


@dataclass(frozen=True)
class Unet(Architecture):
    """Channels 32, 64, 128, 256, 512 on the way down, halved on the way up. Logits are maps as large as the image."""

    width: int = option(32, "channels of the first block", low=1)

    name = "unet"
    example = ((3, 384, 384), 2)
    stages = ("pool1", "pool2", "pool3", "pool4", "bottleneck")

    def build(self, need: Need) -> Built:
        if len(need.sample) != 3 or need.sample[1] % 16 or need.sample[2] % 16:
            raise ConfigError(f"Model 'unet' halves images four times, so their sides must be multiples of 16. "
                              f"Got samples of shape {need.sample} instead.")
        module = UNetModule(need.sample[0], need.classes, self.width)
        down = [name for level in range(1, 5) for name in (f"encoder{level}", f"pool{level}")]
        up = [name for level in range(4, 0, -1) for name in (f"up{level}", f"decoder{level}")]
        return Built(module, Layout(stages=self.stages, extractor=(*down, "bottleneck", *up)))


def _block(inside: int, outside: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a in (inside, outside):
        layers += [nn.Conv2d(a, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers)
