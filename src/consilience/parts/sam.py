"""FedSAM: flat minima on every client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import tree
from ..core.part import Part
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat


@dataclass(frozen=True)
class Sam(Part):
    """Step by the gradient at the worst nearby point: g(w + ρ g/‖g‖).

    Both passes see the same batch and the same draws; running statistics and what other parts track come from the first.
    """

    rho: float = option(0.05, "radius of the neighbourhood", low=0.0, tune=(0.01, 0.05, 0.1, 0.5))

    name = "sam"
    paper = "FedSAM (Qu et al., ICML 2022; Caldarola et al., ECCV 2022)"
    helps = ("label skew", "feature shift")
    departs = ("the base optimiser is the run's; FedFA's release always takes Adam",)
    neutral = {"rho": 0.0}

    def gradient(self, v: StepView, grad_at: Callable[[Flat], Flat]) -> Flat:
        g = grad_at(v.params)
        with torch.no_grad():
            uphill = tree.scale(g, self.rho / (tree.norm(g) + 1e-12))
            shifted = {**v.params, **tree.add(uphill, v.params)}
        return grad_at(shifted)
