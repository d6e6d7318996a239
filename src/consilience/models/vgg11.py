"""VGG11 (configuration A without BatchNorm), features only, with one linear head, as FedBR trains it on CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .architecture import Need, Projected

_CHANNELS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
# torchvision numbers convolutions, ReLUs and pools in one list: 0 | 3 | 6, 8 | 11, 13 | 16, 18 are the convolutions.
_PUBLISHED = {"features.0.": "stage1.0.", "features.3.": "stage2.0.", "features.6.": "stage3.0.",
              "features.8.": "stage3.2.", "features.11.": "stage4.0.", "features.13.": "stage4.2.",
              "features.16.": "stage5.0.", "features.18.": "stage5.2.", "classifier.": "head."}


@dataclass(frozen=True)
class Vgg11(Projected):
    """Five stages of 3×3 convolutions, each ending in a pool; average over positions, 512 features.

    Convolutions start as Kaiming-normal (fan out) with zero biases. Unlike the released code, a batch of one works.
    """

    name = "vgg11"
    example = ((3, 32, 32), 10)
    stages = ("stage1", "stage2", "stage3", "stage4", "stage5")
    published_names = _PUBLISHED

    def body(self, need: Need) -> dict[str, nn.Module]:
        body: dict[str, nn.Module] = {}
        inside = need.sample[0]
        for number, channels in enumerate(_CHANNELS, 1):
            layers: list[nn.Module] = []
            for outside in channels:
                layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
                inside = outside
            body[f"stage{number}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
        return {**body, "pool": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())}

    def initialise(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)
