"""pFedMe: personal models around a global one, which descends their Moreau envelope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .. import tree
from ..core.client import ClientView
from ..core.part import Model, Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import NEEDS_AVERAGE


@dataclass(frozen=True)
class Moreau(Part):
    """On every batch K steps of a personal model near w, θ ← θ − η_p(∇ℓ(θ) + λ(θ − w)); then w is stepped by λ(w − θ).

    With θ at its optimum λ(w − θ) is the gradient at w of min_θ ℓ(θ) + (λ/2)‖θ − w‖². θ begins a round at the received model, goes
    on from batch to batch, and is the model scored. The server takes w ← (1 − β)w + β·(average).
    """

    weight: float = option(15.0, "λ, pull between personal and global model", above=0.0, tune=(1.0, 5.0, 15.0, 30.0))
    steps: int = option(5, "K, steps of the personal model on every batch", low=1, tune=(1, 3, 5, 7))
    inner_lr: float = option(0.01, "η_p, learning rate of the personal model; w has the run's", above=0.0, tune=(0.005, 0.01, 0.05, 0.1))
    decay: float = option(0.001, "weight decay of the personal model's steps", low=0.0)
    beta: float = option(1.0, "β, step of the server towards the average", above=0.0, tune=(1.0, 2.0))

    name = "moreau"
    scored = "after their own local training"
    paper = "pFedMe (Dinh et al., NeurIPS 2020), Alg. 1"
    helps = ("label skew", "feature shift")
    departs = ("the personal steps have the release's weight decay, which is not in the paper; decay=0 leaves it out",
               "θ goes on from batch to batch, as in the release; the paper does not say where it begins",
               "a client that never took part is served the global model")
    not_neutral = "w follows a personal model and never descends its own loss"

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def caution(self, spec: Spec) -> str | None:
        """A step takes θ − w to (1 − η_p·λ)(θ − w), less what the loss asks for."""
        reach = self.inner_lr * self.weight
        if reach <= 2:
            return None
        return (f"has inner_lr·weight = {reach:.3g}: above 2 every personal step leads farther from the global model, whatever the run's "
                f"learning rate. Set moreau.inner_lr below {2 / self.weight:.3g}, or a smaller moreau.weight.")

    def init_kept(self, spec: Spec) -> Tree:
        return {"model": spec.model}

    def init_scratch(self, c: ClientView) -> Tree:
        trained = {k for phase, _ in c.schedule if phase.model == "model" for k in phase.keys}
        return {"theta": {k: p for k, p in c.received["params"].items() if k in trained}}

    def gradient(self, v: StepView, grad_at: Callable[[Flat], Flat]) -> tuple[Flat, Tree]:
        theta = v.scratch["theta"]
        for _ in range(self.steps):
            g = grad_at({**v.params, **theta})
            with torch.no_grad():
                near = tree.pick(theta, g)
                slope = tree.add(tree.add(g, tree.sub(near, v.params), self.weight), near, self.decay)
                theta = {**theta, **tree.add(near, slope, -self.inner_lr)}
        with torch.no_grad():
            return tree.scale(tree.sub(tree.pick(v.params, g), theta), self.weight), {"theta": theta}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        return {"model": {**c.model, "params": {**c.model["params"], **c.scratch["theta"]}}}, {}

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        return (c.received if c.first else c.kept["model"]), True

    def aggregate(self, s: ServerView, change: Flat) -> tuple[Flat, Tree]:
        return (change if self.beta == 1 else tree.scale(change, self.beta)), s.server
