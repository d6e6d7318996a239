"""FedRoD: one head for everybody, and one of one's own on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.client import ClientView
from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree

ABSENT = -1e9        # in place of log 0, whose product with 0 is no number; its exponential is 0 all the same


@dataclass(frozen=True)
class Rod(Part):
    """Base and generic head learn as if every client had all classes equally often; a personal head learns what is missing for its own.

    Generic: CE(g + γ·log n, y), n the client's samples of each class. Personal: CE(g + p, y), to which features and g are constants.
    A client is served by g + p, the server keeps g.
    """

    gamma: float = option(1.0, "γ, power of the class sizes in the balanced softmax; 0 is plain cross-entropy", low=0.0,
                          tune=(0.5, 1.0, 1.5))

    name, needs_vectors = "rod", True
    paper = "FedRoD (Chen and Chao, ICLR 2022), with linear personal heads"
    helps = ("label skew",)
    departs = ("the personal head begins as the generic one does, and takes plain SGD steps with the run's learning rate, as in PFLlib",
               "no hypernetwork that makes personal heads from label distributions")
    neutral = {"gamma": 0.0}        # the global model's; personal heads are trained at any setting

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a second head", "personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        shared = "adds personal heads to one that all clients share and train"
        return {"soft labels": "counts the samples of each class, which needs one true class for every sample", "local head": shared,
                "no global model": shared, "a frozen random head": shared,
                "a separate personal model": "serves clients by both heads of the shared one"}

    def require(self, spec: Spec) -> str | None:
        if any(spec.in_head(k) for k in spec.model["buffers"]):
            return "copies the head, and this model's has running statistics, which would have to be two as well. Use another model."
        return None

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.head,)

    def init_personal(self, spec: Spec) -> Tree:
        return {"head": {k: p for k, p in spec.model["params"].items() if spec.in_head(k)}}

    def init_scratch(self, c: ClientView) -> Tree:
        n = as_probabilities(c.labels(), c.spec.classes).sum(0)
        return {"balance": torch.where(n > 0, self.gamma * n.clamp(min=1).log(), ABSENT if self.gamma else 0.0)}

    def _own(self, v: StepView, z: Tensor) -> Tensor:
        return v.apply(v.spec.layout.head, z, {**v.model, "params": {**v.params, **v.personal["head"]}})

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        return x if v.train or point != v.spec.layout.head else x + self._own(v, v.trace.after[v.spec.features])

    def main_loss(self, v: StepView) -> Any:
        logits = v.trace.logits if v.plain else v.trace.logits + v.scratch["balance"]
        return v.task_loss(logits, v.batch.target)

    def loss(self, v: StepView) -> Any:
        z = v.trace.after[v.spec.features].detach()
        return v.task_loss(v.trace.logits.detach() + self._own(v, z), v.batch.target)
