"""DomainBed's CNN for MNIST, which FedBR trains on rotated digits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .architecture import Need, Projected


@dataclass(frozen=True)
class MnistCnn(Projected):
    """Four 3×3 convolutions with GroupNorm after the ReLU, average over positions, 128 features. No BatchNorm."""

    name = "mnist_cnn"
    example = ((1, 28, 28), 10)
    stages = ("stage1", "stage2", "stage3", "stage4")

    def body(self, need: Need) -> dict[str, nn.Module]:
        return {"stage1": _stage(need.sample[0], 64, 1), "stage2": _stage(64, 128, 2), "stage3": _stage(128, 128, 1),
                "stage4": _stage(128, 128, 1), "pool": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())}


def _stage(inside: int, outside: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, outside))
