"""What ResNet-18 and ResNet-50 share. Names inside blocks are torchvision's, so its weights fit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..errors import ConfigError
from ..layers.norms import norm_relu
from ..options import option
from .architecture import Need, Projected


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inside, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = norm_relu(self.bn1, self.conv1(x))
        return norm_relu(self.bn2, self.conv2(y), self.downsample(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 (where the stride is) and 1×1 convolutions beside a shortcut."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = norm(4 * width)
        self.downsample = _shortcut(inside, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = norm_relu(self.bn1, self.conv1(x))
        y = norm_relu(self.bn2, self.conv2(y))
        return norm_relu(self.bn3, self.conv3(y), self.downsample(x))


@dataclass(frozen=True)
class Norm:
    """Makes the normalisation layer for a number of channels."""

    kind: str
    groups: int

    def __call__(self, channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if self.kind == "batch" else nn.GroupNorm(self.groups, channels)


@dataclass(frozen=True)
class Resnet(Projected):
    """Stem, four layers of residual blocks, average over positions, linear head.

    `stem='7x7'` is ImageNet's (stride 2, then a pool of stride 2), `'3x3'` is CIFAR's (stride 1, no pool).
    """

    stem: str = option("7x7", "first convolution: 7x7 with stride and pool, or 3x3 without", choices=("7x7", "3x3"))
    norm: str = option("batch", "BatchNorm or GroupNorm", choices=("batch", "group"))
    groups: int = option(2, "groups of each GroupNorm", low=1)

    stages = ("stem", "layer1", "layer2", "layer3", "layer4")
    published_names = {"conv1.": "stem.conv.", "bn1.": "stem.norm.", "fc.": "head."}
    block: ClassVar[type[BasicBlock] | type[Bottleneck]]
    depths: ClassVar[tuple[int, ...]]

    def body(self, need: Need) -> dict[str, nn.Module]:
        if 64 % self.groups:
            raise ConfigError(f"The 'groups' option of model {self.name!r} must divide 64 channels. "
                              f"Got {self.groups} instead.")
        norm = Norm(self.norm, self.groups)
        body: dict[str, nn.Module] = {"stem": _stem(need.sample[0], self.stem, norm)}
        inside = 64
        for number, depth in enumerate(self.depths, 1):
            width = 64 * 2 ** (number - 1)
            blocks = []
            for place in range(depth):
                blocks.append(self.block(inside, width, 2 if number > 1 and place == 0 else 1, norm))
                inside = width * self.block.expansion
            body[f"layer{number}"] = nn.Sequential(*blocks)
        return {**body, "pool": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())}

    def initialise(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _stem(channels: int, kind: str, norm: Norm) -> nn.Module:
    large = kind == "7x7"
    conv = nn.Conv2d(channels, 64, 7, 2, 3, bias=False) if large else nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
    layers = OrderedDict[str, nn.Module](conv=conv, norm=norm(64), relu=nn.ReLU())
    if large:
        layers["pool"] = nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(layers)


def _shortcut(inside: int, outside: int, stride: int, norm: Norm) -> nn.Module:
    """The identity where shapes agree, else a 1×1 convolution."""
    if stride == 1 and inside == outside:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))
