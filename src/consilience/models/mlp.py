"""A multilayer perceptron on flattened samples; with two layers of 200 it is FedAvg's "2NN"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from ..options import option
from .architecture import Need, Projected


@dataclass(frozen=True)
class Mlp(Projected):
    """Linear layers with ReLU, named layer1, layer2, …"""

    hidden: tuple[int, ...] = option((200, 200), "width of each hidden layer", low=1)

    name = "mlp"
    example = ((1, 28, 28), 10)

    def body(self, need: Need) -> dict[str, nn.Module]:
        widths = (math.prod(need.sample), *self.hidden)
        layers = {f"layer{i}": nn.Sequential(nn.Linear(a, b), nn.ReLU())
                  for i, (a, b) in enumerate(pairwise(widths), 1)}
        return {"flatten": nn.Flatten(), **layers}
