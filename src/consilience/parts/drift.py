"""LfD: learn against one's own drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.part import Part
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from .cosine import Cosine
from .kernels import drift as kernel


@dataclass(frozen=True)
class Drift(Part):
    """Labels that point back from where the client drifted last time.

    Drift D(x) = log p_previous − log p_received; auxiliary label ŷ = softmax(−D) = softmax(f_received − f_previous), constant
    in training. Loss: CE(l, y) + CE(l, ŷ) with margin logits l = f − (m/τ)·1[y]; inference has no margin. Soft labels
    take the margin by their weights.
    """

    tau: float = option(0.1, "temperature of the head's logits: the margin is measured in cosines", above=0.0)
    margin: float = option(0.15, "m, subtracted from the true class's cosine in training", low=0.0, tune=(0.0, 0.1, 0.15, 0.2))
    weight: float = option(1.0, "weight of the auxiliary label; the paper has no such number, that is 1", low=0.0)
    first: str = option("skip", "a client's first round, without a previous model: skip the term, or take uniform labels",
                        choices=("skip", "uniform"))
    margin_in_reg: bool = option(True, "the margin also acts in the auxiliary term (eq. 10)")
    drift_tau: float = option(1.0, "temperature of the softmax over the drift", above=0.0)

    name, previous, teachers, needs_vectors = "drift", True, ("received", "previous"), True
    paper = "LfD (Kim et al.), eq. 3 and 8–10"
    helps = ("label skew",)
    departs = ("no code was released: the first participation, the margin inside the regulariser and the drift's temperature are "
               "readings, each with its option", "eq. 9's sign slip is read as eq. 10")
    neutral = {"margin": 0.0, "weight": 0.0}

    def objection(self, other: Part) -> str | None:
        if isinstance(other, Cosine) and self.margin and other.tau != self.tau:
            return (f"measures its margin by tau={self.tau:g}, and the logits of {other.name} have tau={other.tau:g}: give both parts "
                    "one, as lfd.tau does")
        return None

    def _with_margin(self, v: StepView) -> Tensor:
        return v.trace.logits - self.margin / self.tau * as_probabilities(v.batch.target, v.spec.classes)

    def _in_one(self, v: StepView) -> tuple[Tensor, Tensor] | None:
        """Both terms by one kernel, where it can."""
        now = v.trace.logits
        if not kernel.usable(now):
            return None
        received, previous = v.forward(v.received, v.batch.x).logits, v.forward(v.previous, v.batch.x).logits
        return kernel.both(now, v.batch.target, received, previous, v.first, self.margin / self.tau, self.weight, 1 / self.drift_tau,
                                self.margin_in_reg, self.first == "uniform")

    def main_loss(self, v: StepView) -> Any:
        done = v.once("both", lambda: self._in_one(v))
        if done is not None:
            return done[0]
        return F.cross_entropy(self._with_margin(v), v.batch.target)

    def loss(self, v: StepView) -> Any:
        done = v.once("both", lambda: self._in_one(v))
        if done is not None:
            return done[1]
        back = v.forward(v.received, v.batch.x).logits - v.forward(v.previous, v.batch.x).logits
        label = (back / self.drift_tau).softmax(1)
        if self.first == "uniform":
            label = torch.where(v.first, 1.0 / v.spec.classes, label)
        term = F.cross_entropy(self._with_margin(v) if self.margin_in_reg else v.trace.logits, label)
        return self.weight * (torch.where(v.first, 0.0, term) if self.first == "skip" else term)
