"""AlexNet with BatchNorm, as FedFA trains it on Office-Caltech-10 and DomainNet (its Table 10)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .architecture import Need, Projected, flat_width, shape_after


@dataclass(frozen=True)
class AlexnetBn(Projected):
    """Five convolution stages of 64, 192, 384, 256 and 256 channels, each ending where FFA acts; 1024 features."""

    name = "alexnet_bn"
    example = ((3, 256, 256), 10)
    stages = ("stage1", "stage2", "stage3", "stage4", "stage5")

    def body(self, need: Need) -> dict[str, nn.Module]:
        maps = {"stage1": _stage(need.sample[0], 64, 11, stride=4, padding=2, pool=True),
                "stage2": _stage(64, 192, 5, padding=2, pool=True), "stage3": _stage(192, 384, 3, padding=1),
                "stage4": _stage(384, 256, 3, padding=1), "stage5": _stage(256, 256, 3, padding=1, pool=True)}
        maps["pool"] = _average_to(6, shape_after(maps, need, self.name)[1:])
        flat = flat_width(maps, need, self.name)
        neck = nn.Sequential(nn.Flatten(), nn.Linear(flat, 1024), nn.BatchNorm1d(1024), nn.ReLU(),
                             nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU())
        return {**maps, "neck": neck}


def _stage(inside: int, outside: int, kernel: int, *, padding: int, stride: int = 1, pool: bool = False) -> nn.Module:
    layers = [nn.Conv2d(inside, outside, kernel, stride, padding), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(3, 2)] if pool else []))


def _average_to(side: int, size: tuple[int, ...]) -> nn.Module:
    """Adaptive averaging to side×side. On 7×7 maps (256-pixel images) its windows are 2×2 at stride 1; written that way
    its gradient is added in a fixed order on a GPU, which the adaptive layer's is not."""
    if size == (side + 1, side + 1):
        return nn.AvgPool2d(2, stride=1)
    return nn.Identity() if size == (side, side) else nn.AdaptiveAvgPool2d(side)
