"""A cosine classifier in place of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.part import Part, Spec
from ..options import option
from .kernels import cosine as kernel


class CosineHead(nn.Module):
    """Logits are cosines between the feature and each class's weight, over a temperature; no bias."""

    def __init__(self, features: int, classes: int, tau: float, init: str = "normal") -> None:
        super().__init__()
        if init == "linear":
            self.weight = nn.Linear(features, classes, bias=False).weight
        else:
            self.weight = nn.Parameter(torch.randn(classes, features) / features**0.5)
        self.tau = tau

    def forward(self, u: Tensor) -> Tensor:
        if kernel.usable(u, self.weight):
            return kernel.cosines(u, self.weight, 1 / self.tau)
        return F.linear(F.normalize(u), F.normalize(self.weight)) / self.tau


@dataclass(frozen=True)
class Cosine(Part):
    """LfD's classifier: c_j = ⟨u/‖u‖, W_j/‖W_j‖⟩, logits c_j/τ. A part of its own, so that baselines can have it too."""

    tau: float = option(0.1, "temperature of the logits", above=0.0, tune=(0.05, 0.1, 0.2))
    init: str = option("normal", "first rows of W: normal with variance 1/d (length about 1), or as nn.Linear begins, uniform within "
                                 "±1/√d (length about 0.58; shorter rows turn faster)", choices=("normal", "linear"))

    name = "cosine"
    needs_vectors = True
    paper = "LfD (Kim et al.), eq. 6 and section 4"
    helps = ("label skew",)
    departs = ("the paper does not say how W begins; init=linear begins as PyTorch's linear head does",)
    not_neutral = "it replaces the head"

    @property
    def claims(self) -> Mapping[str, str]:
        return {"head": "replaces it by a cosine classifier"}

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"a frozen random head": "needs its classifier to be trained",
                "a second head": "has cosines for logits, to which another head's are not to be added",
                "extra outputs": "gives cosines over τ, with which outputs of another kind cannot be compared"}

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        module.set_submodule(spec.layout.head, CosineHead(spec.width, spec.classes, self.tau, self.init))
        return module
