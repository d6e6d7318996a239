"""Mixup inside a client's batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.part import Batch, Part, Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree
from . import _mixing


@dataclass(frozen=True)
class Mixup(Part):
    """Mix each batch with a permutation of itself, λ ~ Beta(α, α) once per step; labels become probabilities."""

    alpha: float = option(0.2, "of the Beta distribution; 0 mixes nothing", low=0.0, tune=(0.1, 0.2, 0.4, 1.0))

    name, rank = "mixup", 10
    paper = "mixup (Zhang et al., ICLR 2018); in FedBR and FedFA inside one client's batch"
    helps = ("label skew", "feature shift")
    departs = ("on segmentation masks are mixed, not the two losses; they differ in the Dice term only",)
    neutral = {"alpha": 0.0}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"soft labels"})

    def require(self, spec: Spec) -> str | None:
        return "mixes inputs, and whole numbers, as the words of a text, cannot be mixed." if spec.tokens and self.alpha else None

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        return {"weight": _mixing.weights(key, self.alpha, len(sizes)), "order": _mixing.partners(key, spec, sizes)}

    def batch(self, v: StepView) -> Batch:
        b = v.batch
        w, other = v.plan["weight"], v.plan["order"][: len(b.x)]
        mix = lambda t: _mixing.mixed(t, w, other)
        return b._replace(x=mix(b.x), target=mix(as_probabilities(b.target, v.spec.classes)))
