"""FedBR: pseudo-data against biased classifiers, and a min-max contrast against biased features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree
from . import _contrast, _pseudo_data


@dataclass(frozen=True)
class Debias(Part):
    """Component 1: λ·CE of pseudo-data with uniform labels. Component 2: μ·contrast through an attached projection P.

    Contrast, row by row: softplus(a₂ s₂ − a₁ s₁), s₁ = cos(P(z_p), P(z_g)), s₂ = cos(P(z_p), P(z)), with z features of the batch,
    z_p of the pseudo-data and z_g of the pseudo-data in the received model. In every step P first ascends the contrast (max
    step), then the model descends task + μ·contrast + λ·pseudo loss (min step). λ=0 or μ=0 switches a component off.
    Pseudo-data: rsm are means of `group` samples of random clients; mixture mixes means of public proxy samples with the batch.
    """

    mu: float = option(0.5, "μ, weight of component 2", low=0.0, tune=(0.1, 0.5, 1.0))
    lam: float = option(1.0, "λ, weight of component 1 (the paper: 1.0 on MNIST and CIFAR-100, 0.1 on CIFAR-10 and PACS)", low=0.0,
                        tune=(0.1, 0.5, 1.0))
    tau1: float = option(2.0, "τ₁ of the positive pair", low=0.0)
    tau2: float = option(2.0, "τ₂ of the negative pair", low=0.0)
    temperature: str = option("multiply", "similarities times τ (release, Tables 10 and 11) or over τ (eq. 5)",
                              choices=("multiply", "divide"))
    max_step: bool = option(True, "P ascends the contrast first; false: P stays as received (Table 4)")
    projection: str = option("paper", "P: 256→256→128 (paper), 2d→2d→d (release), or none: the identity, no max step",
                             choices=("paper", "released", "none"))
    pseudo: str = option("rsm", "where pseudo-data come from; mixture needs a proxy data set", choices=("rsm", "mixture"))
    group: int = option(10, "M, samples averaged into one pseudo sample; 1 would send samples as they are", low=1)
    mix: int = option(1, "K, samples of the batch mixed into each pseudo sample (mixture)", low=0)
    refresh: str = option("round", "pseudo-data anew each round, or once; those of mixture are drawn once", choices=("round", "once"))
    received: str = option("auto", "z_g, the received model's features of pseudo-data: once a round, or in every step; auto: once for rsm, "
                                   "in every step for mixture, where once means of the first step's mixture (release)",
                           choices=("auto", "once", "step"))
    sources: str = option("random", "each pseudo sample's client: drawn at random, or every client equally often",
                          choices=("random", "balanced"))

    name = "debias"
    needs_vectors = True
    paper = "FedBR (Guo et al., ICML 2023), eq. 3–7, Alg. 1–3"
    helps = ("label skew", "feature shift")
    departs = ("temperature=multiply, as the released code and the sweep down to τ₂ = 0 show; divide is eq. 5",
               "projection=paper has 256 and 128 units; released has 2d and d",
               "in mixture mode z_g is computed for each step's own mixture; received=once keeps that of the first, as released")
    neutral, trial = {"mu": 0.0, "lam": 0.0}, {"projection": "released"}
    reduce, prefers = {"rows": "concat"}, {"weights": "uniform"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"averages of raw samples"} if self.pseudo == "rsm" else ())

    @property
    def uploads(self) -> Mapping[str, str]:
        return self.reduce if self.pseudo == "rsm" else {}

    @property
    def raw_averages(self) -> str:
        what = f"means of {self.group} training inputs of one client" if self.group > 1 else "single training inputs, as they are"
        when = "before the first round" if self.refresh == "once" else "in every round"
        return f"{what}, sent {when}; all clients get them" if self.pseudo == "rsm" else ""

    def require(self, spec: Spec) -> str | None:
        if spec.tokens:
            return "averages inputs, and whole numbers, as the words of a text, have no average."
        if self.temperature == "divide" and min(self.tau1, self.tau2) == 0:
            return "cannot divide by a temperature of 0. Use temperature=multiply, or τ above 0."
        if self.pseudo == "mixture" and spec.proxy is None:
            return "needs public samples for pseudo=mixture. Name a proxy data set for the run, or use pseudo=rsm."
        if self.pseudo == "mixture" and self.sources == "balanced":
            return "takes nothing from clients for pseudo=mixture, so sources=balanced says nothing. Leave it out, or use pseudo=rsm."
        if self.pseudo == "rsm" and self.mix != 1:
            return f"mixes nothing into pseudo-data for pseudo=rsm, so mix={self.mix} says nothing. Leave it out, or use pseudo=mixture."
        return None

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        d, (h, out) = spec.width, (256, 128) if self.projection == "paper" else (2 * spec.width, spec.width)
        if self.projection != "none":
            module.add_module(self.name, nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, out)))
        return module

    def init_shared(self, spec: Spec) -> Tree:
        return {"pseudo": _pseudo_data.at_first(spec, self.name, self.group, self.pseudo == "mixture")}

    @property
    def _looks(self) -> str:
        """When z_g is made: once a round, in every step, or in its first step, whose mixture then stands for all."""
        mixed = self.pseudo == "mixture" and self.mix > 0
        return ("first" if self.received == "once" else "step") if mixed else ("step" if self.received == "step" else "once")

    @property
    def unused(self) -> frozenset[str]:
        asked = {hook for when, hook in _pseudo_data.ASKED.items() if self.pseudo != "rsm" or when != self.refresh}
        return frozenset(asked if self._looks == "first" else asked | {"track"})

    def prepare(self, c: ClientView) -> Tree:
        return {"rows": _pseudo_data.own_share(c, self.group, self.sources == "random")}

    def survey(self, c: ClientView) -> Tree:
        return self.prepare(c)

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return {"pseudo": s.reduced["rows"]}, {}

    def init_scratch(self, c: ClientView) -> Tree:
        return _pseudo_data.looked_at(c, self._looks)

    def track(self, v: StepView) -> Tree:
        """z_g of the first step that comes here: a round may begin with others, as FedRep's, which train the head alone."""
        made, fresh = v.scratch["made"], _pseudo_data.in_received(v, self._pseudo(v)[0])
        return {"global": torch.where(made, v.scratch["global"], fresh), "made": torch.ones_like(made)}

    def _pseudo(self, v: StepView) -> tuple[Tensor, Tensor | None]:
        """This step's pseudo-data and their labels: none where they are uniform."""
        return _pseudo_data.of_step(v, self.mix if self.pseudo == "mixture" else 0)

    def _features(self, v: StepView) -> Tensor:
        """z_p, z_g and z, joined once for both steps."""
        return v.once("features", lambda: _pseudo_data.features(v, self._pseudo(v)[0]))

    def _projected(self, v: StepView, x: Tensor, train: bool = False) -> Tensor:
        """One pass of P over all features. In the min step P is a constant: nobody asks for its gradient."""
        if self.projection == "none":
            return x
        still = {k: p.detach() if k.startswith(self.name + ".") else p for k, p in v.params.items()}
        return v.apply(self.name, x, v.model if train else {**v.model, "params": still})

    def _terms(self, projected: Tensor | None, mu: float, logits: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """μ·contrast of projected pseudo, received and batch features + λ·cross-entropy of pseudo logits, uniform without labels."""
        a1, a2 = (self.tau1, self.tau2) if self.temperature == "multiply" else (1 / self.tau1, 1 / self.tau2)
        return _contrast.terms(projected, a1, a2, mu, logits, labels, self.lam)

    def beside(self, v: StepView) -> Tensor | None:
        return self._pseudo(v)[0] if self.mu or self.lam else None

    def adversary(self, v: StepView) -> Any:
        if not self.mu or not self.max_step or self.projection == "none":
            return 0.0
        return self._terms(self._projected(v, self._features(v).detach(), train=True), -1.0)

    def loss(self, v: StepView) -> Any:
        if not self.mu and not self.lam:
            return 0.0
        projected = self._projected(v, self._features(v)) if self.mu else None
        x, labels = self._pseudo(v)
        return self._terms(projected, self.mu, _pseudo_data.passed(v, x).logits if self.lam else None, labels)
