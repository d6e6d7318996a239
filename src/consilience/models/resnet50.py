"""ResNet-50."""

from __future__ import annotations

from dataclasses import dataclass

from .resnet import Bottleneck, Resnet


@dataclass(frozen=True)
class Resnet50(Resnet):
    """2048 features. FedFM uses it with the 3×3 stem on CIFAR-100."""

    name = "resnet50"
    example = ((3, 32, 32), 100)
    block = Bottleneck
    depths = (3, 4, 6, 3)
