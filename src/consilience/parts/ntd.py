"""FedNTD: keep the global model's opinion on what a sample is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option


@dataclass(frozen=True)
class Ntd(Part):
    """Distil the received model's probabilities of the not-true classes: + β τ² KL(softmax(g̃/τ) ‖ softmax(l̃/τ)).

    g̃, l̃ are the logits without the true class's entry.
    """

    beta: float = option(1.0, "weight of the distillation", low=0.0, tune=(0.1, 0.3, 1.0, 3.0))
    tau: float = option(1.0, "temperature", above=0.0)

    name, teachers, needs_vectors = "ntd", ("received",), True
    paper = "FedNTD (Lee et al., NeurIPS 2022), eq. 5"
    helps = ("label skew",)
    neutral = {"beta": 0.0}

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"soft labels": "needs the one true class of every sample"}

    def require(self, spec: Spec) -> str | None:
        return "needs at least three classes: without the true one a single class is left." if spec.classes < 3 else None

    def loss(self, v: StepView) -> Any:
        local = (without_true(v.trace.logits, v.batch.y) / self.tau).log_softmax(1)
        fixed = (without_true(v.forward(v.received, v.batch.x).logits, v.batch.y) / self.tau).log_softmax(1)
        divergence = (fixed.exp() * (fixed - local)).sum(1).mean()
        return self.beta * self.tau**2 * divergence


def without_true(logits: Tensor, y: Tensor) -> Tensor:
    """(B, C) → (B, C − 1): every row without its label's entry, by a gather so that shapes depend on no value."""
    rest = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, rest + (rest >= y[:, None]))
