"""Ditto: a personal model beside the global one."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.client import ClientView
from ..core.correction import Correction
from ..core.part import Model, Part, Phase, Spec
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree


@dataclass(frozen=True)
class Ditto(Part):
    """A second, personal model trained near the received one: v ← v − η(∇ℓ(v) + λ(v − wᵗ)). It is the one scored."""

    weight: float = option(0.1, "λ, pull of the personal model towards the received one", low=0.0, tune=(0.01, 0.1, 0.5, 1.0))
    epochs: int = option(1, "epochs of the personal model in a round", low=1)

    name = "ditto"
    acts_on = "ditto"
    scored = "after their own local training"
    paper = "Ditto (Li et al., ICML 2021)"
    helps = ("label skew", "feature shift")
    departs = ("the pull is towards the model received in this round, over the whole model",)
    neutral = {}        # at any setting: the global model is FedAvg's

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models", "a separate personal model"})

    def init_personal(self, spec: Spec) -> Tree:
        return {"model": spec.model}

    def phases(self, phases: list[Phase], spec: Spec) -> list[Phase]:
        keys = tuple(dict.fromkeys(k for p in phases for k in p.keys))
        return [*phases, Phase("ditto", keys, model="ditto", epochs=self.epochs)]

    def correction(self, v: StepView) -> Correction:
        return Correction(strength=self.weight, target=v.received["params"])

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        return c.personal["model"], False
