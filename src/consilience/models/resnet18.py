"""ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass

from .resnet import BasicBlock, Resnet


@dataclass(frozen=True)
class Resnet18(Resnet):
    """512 features. FedFM uses it with the 7×7 stem on CIFAR-10; DBE the same on 64-pixel images."""

    name = "resnet18"
    example = ((3, 32, 32), 10)
    block = BasicBlock
    depths = (2, 2, 2, 2)
