"""FedProx: stay near the received model."""

from __future__ import annotations

from dataclasses import dataclass

from .. import tree
from ..core.correction import Correction
from ..core.part import Part
from ..core.step_view import StepView
from ..options import option


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

    def correction(self, v: StepView) -> Correction:
        return Correction(strength=self.mu, target=tree.pick(v.received["params"], v.travelling))
