"""DBE's personalised representation bias memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree


@dataclass(frozen=True)
class Prbm(Part):
    """A personal vector added to the representation: z = z_g + p_i, trained by plain SGD and never sent.

    p_i has the shape of one sample at the chosen point and starts at 0. It acts in training and in personalised evaluation.
    """

    at: str = option("features", "the point: features (what enters the head), or the name of a module")

    name, rank = "prbm", 70
    paper = "DBE (Zhang et al., NeurIPS 2023), eq. 3"
    helps = ("label skew", "feature shift")
    not_neutral = "the vector is always trained"

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models"})

    def point(self, layout: Layout) -> str:
        return layout.features if self.at == "features" else self.at

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (self.point(layout),)

    def init_personal(self, spec: Spec) -> Tree:
        return {"shift": torch.zeros(spec.shapes[self.point(spec.layout)])}

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        return x + v.personal["shift"] if point == self.point(v.spec.layout) else x
