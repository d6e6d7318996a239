"""FedProx: stay near the received model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.part import Part
from ..core.step import StepView
from ..options import option
from ..tree import Flat
from . import _pull


@dataclass(frozen=True)
class Prox(Part):
    """Pull the parameters that train and travel towards the received ones: + (μ/2)‖w − wᵗ‖²."""

    mu: float = option(0.01, "strength of the pull", low=0.0, tune=(0.001, 0.01, 0.1, 1.0))

    name = "prox"
    paper = "FedProx (Li et al., MLSys 2020), eq. 2"
    helps = ("label skew", "quantity skew")
    departs = ("the norm is squared, as published; some releases leave the square out",)
    neutral = {"mu": 0.0}
    refuses = {"no global model": "pulls towards it"}

    def loss(self, v: StepView) -> Any:
        return _pull.loss(v, v.travelling, v.received["params"], self.mu)

    def grad(self, v: StepView, g: Flat) -> Flat:
        return _pull.grad(v, g, v.travelling, v.received["params"], self.mu)
