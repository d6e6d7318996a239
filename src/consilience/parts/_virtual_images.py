"""Images of nothing: latent vectors, a distribution for each class, through a network that nobody has trained."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import rng
from ..core.part import Spec

LATENT, CHANNELS, SPREAD, AT_ONCE = 64, 16, 1.0, 256      # SPREAD: of latent vectors around their class, in units of that of the classes


def draw(spec: Spec, name: str, count: int) -> tuple[Tensor, Tensor]:
    """`count` samples in the shape of the data's, every channel with mean 0 and deviation 1 over all of them; and their classes."""
    def normal(word: str, *shape: int, fan_in: int = 1) -> Tensor:
        return rng.normal(spec.key(name, word), shape) * fan_in**-0.5

    labels = torch.arange(count) % spec.classes
    latent = normal("classes", spec.classes, LATENT)[labels] + SPREAD * normal("latent", count, LATENT)
    wide = len(spec.sample) == 3
    side, channels = (4, CHANNELS) if wide else (1, 4 * LATENT)
    first = normal("first", LATENT, channels * side * side, fan_in=LATENT)
    out = spec.sample[0] if wide else prod(spec.sample)
    last = normal("last", out, channels, *(3, 3) if wide else (), fan_in=channels * (9 if wide else 1))
    doublings = 0
    while wide and side << doublings < max(spec.sample[1:]):
        doublings += 1
    middle = [normal(f"middle {n}", channels, channels, 3, 3, fan_in=channels * 9) for n in range(doublings)]

    def through(z: Tensor) -> Tensor:
        if not wide:
            return (F.leaky_relu(z @ first, 0.2) @ last.T).reshape(-1, *spec.sample)
        x = F.leaky_relu(z @ first, 0.2).reshape(-1, channels, side, side)
        for weight in middle:
            x = F.leaky_relu(F.conv2d(F.interpolate(x, scale_factor=2.0), weight, padding=1), 0.2)
        return F.conv2d(x, last, padding=1)[..., : spec.sample[1], : spec.sample[2]]

    x = torch.cat([through(z) for z in latent.split(AT_ONCE)])
    others = [d for d in range(x.dim()) if d != 1]
    return (x - x.mean(others, keepdim=True)) / x.std(others, keepdim=True), labels
