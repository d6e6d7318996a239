"""FedRobust: train against the worst affine change of a client's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.method import Method
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree


@dataclass(frozen=True)
class Affine(Part):
    """Every client changes its inputs, x → Λx + δ, to make the loss large; the model learns from changed inputs.

    Λ mixes the channels of a sample (c×c), δ has one offset for each; for a sample that is one vector they are the whole affine change.
    In every step (Λ, δ) ascend loss − λ(‖Λ − I‖² + ‖δ‖²), then the model descends the loss of the batch changed by the new ones. They
    start at I and 0, stay on the client, and act in training alone.
    """

    weight: float = option(1.0, "λ, what it costs to be away from I and 0", low=0.0, tune=(0.1, 1.0, 10.0))
    ascent: float = option(1.0, "η₂ over η₁: the ascent's learning rate in units of the run's; 0 changes nothing", low=0.0,
                           tune=(0.1, 1.0, 10.0))

    name, rank, only_in_training = "affine", 20, True
    paper = "FedRobust (Reisizadeh et al., NeurIPS 2020), the affine case"
    helps = ("feature shift",)
    departs = ("Λ mixes channels and δ shifts them; a matrix over all pixels of an image would have billions of entries",
               "the ascent comes first, and the descent sees its result; λ and η₂ of the tables we compare with are not printed")
    neutral = {"ascent": 0.0}
    prefers = {"weights": "uniform"}

    def objection(self, other: Part) -> str | None:
        if Method.has(other, "relabel"):
            return f"ascends the loss before {other.name} mixes the labels of features that it mixed"
        return None

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.entry,)

    def require(self, spec: Spec) -> str | None:
        return "changes inputs by numbers, and the words of a text are no numbers." if spec.tokens and self.ascent else None

    def init_personal(self, spec: Spec) -> Tree:
        channels = spec.sample[0]
        return {"matrix": torch.eye(channels), "offset": torch.zeros(channels)}

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        if not v.train or not self.ascent or point != v.spec.layout.entry:
            return x
        matrix, offset = v.personal["matrix"], v.personal["offset"]
        return torch.einsum("dc,nc...->nd...", matrix, x) + offset.reshape(-1, *[1] * (x.dim() - 2))

    def before(self, v: StepView) -> Any:
        if not self.ascent:
            return 0.0
        x = v.batch.x.view_as(v.batch.x)          # a name of its own: nobody shall be handed this pass, whose graph ends here
        logits = v.forward(v.model, x, train=True, taps=True).logits
        matrix, offset = v.personal["matrix"], v.personal["offset"]
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        away = (matrix - eye).square().sum() + offset.square().sum()
        return self.ascent * (self.weight * away - v.task_loss(logits, v.batch.target))
