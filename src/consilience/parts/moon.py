"""MOON: model-contrastive learning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option
from ._reasons import OWN_MODEL
from .kernels import moon as kernel


@dataclass(frozen=True)
class Moon(Part):
    """Pull features to the received model's and push them from the client's previous model's.

    + μ·mean −log( e^{s_g/τ} / (e^{s_g/τ} + e^{s_p/τ}) ), cosines of the features that enter the head. The term is skipped
    for a client that has no previous model.
    """

    mu: float = option(1.0, "weight of the contrast", low=0.0, tune=(0.001, 0.01, 0.1, 1.0, 5.0, 10.0))
    tau: float = option(0.5, "temperature", above=0.0)
    projection: int = option(0, "width of a projection (linear, ReLU, linear) put before the head; 0 for none, as when the "
                                "model has a header", low=0)
    hidden: int = option(0, "width of the projection's hidden layer; 0: of the features, as MOON has it (FedBR, App. A: 256)", low=0)

    name, previous, teachers, needs_vectors = "moon", True, ("received", "previous"), True
    paper = "MOON (Li et al., CVPR 2021), eq. 3"
    helps = ("label skew",)
    departs = ("never-sampled clients have no negative; the release uses a random network",)
    neutral = {"mu": 0.0}
    refuses = {OWN_MODEL: "contrasts the received model with the previous one, which are then the same"}

    @property
    def claims(self) -> Mapping[str, str]:
        return {"head": "puts a projection before it"} if self.projection else {}

    def point(self, layout: Layout) -> str:
        return f"{layout.head}.out:input" if self.projection else layout.features

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (self.point(layout),)

    def require(self, spec: Spec) -> str | None:
        return "has hidden without a projection. Set projection too, or leave hidden out." if self.hidden and not self.projection else None

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        if self.projection:
            d, h, out = spec.width, self.hidden or spec.width, self.projection
            stack = OrderedDict(inner=nn.Linear(d, h), relu=nn.ReLU(), outer=nn.Linear(h, out), out=nn.Linear(out, spec.classes))
            module.set_submodule(spec.layout.head, nn.Sequential(stack))
        return module

    def loss(self, v: StepView) -> Any:
        at = self.point(v.spec.layout)
        z, received, previous = v.trace.before[at], v.forward(v.received, v.batch.x).before[at], v.forward(v.previous, v.batch.x).before[at]
        if kernel.usable(z, received, previous):
            return kernel.contrast(z, received, previous, v.first, self.mu, self.tau)
        near, far = F.cosine_similarity(z, received), F.cosine_similarity(z, previous)
        return self.mu * torch.where(v.first, 0.0, F.softplus((far - near) / self.tau).mean())
