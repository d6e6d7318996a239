"""DANN over clients: features that do not tell where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option


@dataclass(frozen=True)
class Dann(Part):
    """An attached discriminator guesses the client from the features; the features learn to deceive it.

    In every step the discriminator takes one descent step on its cross-entropy, then the model minimises the task − λ times it.
    The discriminator is averaged like the model.
    """

    weight: float = option(0.01, "λ, weight of the deception", low=0.0, tune=(0.01, 0.1, 1.0))
    hidden: int = option(256, "width of the discriminator's two hidden layers", low=1)

    name = "dann"
    needs_vectors = True
    paper = "DANN (Ganin et al., JMLR 2016), over clients as in FedBR"
    helps = ("feature shift",)
    departs = ("FedBR's release alternates steps, so that half of them do not train the classifier; here every step does both",)
    neutral = {"weight": 0.0}
    trial = {"hidden": 8}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a comparison of clients"})

    def require(self, spec: Spec) -> str | None:
        return "needs at least two clients to tell apart." if spec.population < 2 else None

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        d, h = spec.width, self.hidden
        guess = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, spec.population))
        module.add_module(self.name, guess)
        return module

    def _guess_loss(self, v: StepView, z: Tensor) -> Tensor:
        return F.cross_entropy(v.apply(self.name, z), v.client.expand(len(z)))

    def adversary(self, v: StepView) -> Any:
        return self._guess_loss(v, v.features.detach())

    def loss(self, v: StepView) -> Any:
        return -self.weight * self._guess_loss(v, v.features)
