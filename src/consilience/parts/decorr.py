"""FedDecorr: features whose dimensions say different things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.part import Part
from ..core.step_view import StepView
from ..options import option

EPS = 1e-8


@dataclass(frozen=True)
class Decorr(Part):
    """Keep the correlations K of a batch's features small: + β‖K‖²/d², where K = ZᵀZ/B of the features with mean 0 and deviation 1.

    Label skew makes the features of a client, and then of the global model, collapse to few directions. Nothing happens in a batch
    of one.
    """

    beta: float = option(0.1, "weight of the correlations", low=0.0, tune=(0.01, 0.05, 0.1, 0.3))
    scale: str = option("paper", "paper: the mean of K² over all pairs of dimensions; official: B times its mean over different ones, "
                                 "which pulls about B times as hard", choices=("paper", "official"))

    name, needs_vectors = "decorr", True
    paper = "FedDecorr (Shi et al., ICLR 2023)"
    helps = ("label skew",)
    departs = ("the release weighs the term by the batch's size and leaves the diagonal out: scale=official",)
    neutral = {"beta": 0.0}

    def loss(self, v: StepView) -> Any:
        z = v.features
        return self.beta * _correlation(z, self.scale) if len(z) > 1 else z.new_zeros(())


def _correlation(z: Tensor, scale: str) -> Tensor:
    """How much the dimensions of z, samples × dimensions, repeat each other."""
    samples, dimensions = z.shape
    z = z - z.mean(0)
    z = z / (z.square().sum(0) / (samples - 1) + EPS).sqrt()                   # a dead dimension stays 0
    squares = (z.T @ z / samples).square()
    if scale == "paper":
        return squares.mean()
    return samples * (squares.sum() - squares.diagonal().sum()) / max(1, dimensions * (dimensions - 1))
