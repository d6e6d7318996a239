"""MoEx: samples of a batch exchange the moments of their features, and some of their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree
from . import _mixing

EPS = 1e-5


@dataclass(frozen=True)
class MoEx(Part):
    """Give a stage's maps the moments of a partner in the batch, x̂ = s'·(x − m)/s + m', and the label λy + (1 − λ)y'.

    moments=pono: mean and deviation over the channels, at every position; instance: over the positions, of every channel. Gradients
    flow through both. One coin and one permutation a step. Nothing happens in evaluation.
    """

    p: float = option(1.0, "chance that a step exchanges moments (1 on ImageNet, 0.25 on CIFAR)", low=0.0, high=1.0, tune=(0.25, 0.5, 1.0))
    lam: float = option(0.9, "λ, weight of a sample's own label (0.9 on ImageNet, 0.5 on CIFAR)", low=0.0, high=1.0, tune=(0.5, 0.7, 0.9))
    stage: int = option(1, "after which stage, counted from 1", low=1)
    moments: str = option("pono", "over channels at each position, or over positions of each channel", choices=("pono", "instance"))

    name, rank = "moex", 20                               # before ffa, whose statistics see what was exchanged
    paper = "MoEx (Li et al., CVPR 2021); in FedFA inside one client's batch"
    helps = ("feature shift",)
    departs = ("on segmentation masks are mixed, not the two losses; they differ in the Dice term only",)
    neutral = {"p": 0.0}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"soft labels", _mixing.PAIRED})

    def points(self, layout: Layout) -> tuple[str, ...]:
        return _mixing.chosen(layout, (self.stage,), self.name, option="stage")

    def require(self, spec: Spec) -> str | None:
        (point,) = self.points(spec.layout)
        if self.moments == "instance":
            return _mixing.no_spread(spec, (point,), self.name, option="stage")
        shape = spec.shapes[point]
        return None if len(shape) == 3 and shape[0] > 1 else f"needs maps of at least two channels, but {point!r} has shape {shape}."

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        return {"on": _mixing.coins(key, self.p, len(sizes)), "order": _mixing.partners(key, spec, sizes)}

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        plan = v.once("plan", lambda: v.plan)
        if not v.train or not plan or point not in self.points(v.spec.layout):
            return x
        var, mean = torch.var_mean(x, 1 if self.moments == "pono" else (2, 3), keepdim=True)
        std, other = (var + EPS).sqrt(), plan["order"][: len(x)]
        ratio = std.index_select(0, other) / std
        return torch.where(plan["on"], x * ratio + (mean.index_select(0, other) - mean * ratio), x)

    def relabel(self, v: StepView) -> Tensor:
        plan, target = v.once("plan", lambda: v.plan), as_probabilities(v.batch.target, v.spec.classes)
        return _mixing.mixed(target, torch.where(plan["on"], self.lam, 1.0), plan["order"][: len(target)])
