"""Per-FedAvg: a start from which one step on one's own samples goes far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .. import tree
from ..core.client import ClientView
from ..core.part import Batch, Model, Part
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat
from ._mixing import PAIRED


@dataclass(frozen=True)
class Maml(Part):
    """Descend the loss after a step of adaptation: w̃ = w − α∇ℓ₁(w), then w ← w − η∇ℓ₂(w̃), ℓ₁ and ℓ₂ over two halves of the batch.

    Hessian-free: w ← w − η(g − α·(∇ℓ₃(w + δg) − ∇ℓ₃(w − δg))/2δ) with g = ∇ℓ₂(w̃), over thirds. Before a client's model is scored it
    takes `adapt` plain steps at α on training samples of its own.
    """

    alpha: float = option(1.0, "α of the adaptation, in multiples of the run's learning rate; 0 adapts nothing and leaves batches whole",
                          low=0.0, tune=(0.5, 1.0, 2.0, 10.0))
    order: str = option("first", "first: second derivatives are left out; hessian_free: they come from a central difference",
                        choices=("first", "hessian_free"))
    delta: float = option(1e-3, "δ of the central difference", above=0.0)
    adapt: int = option(1, "steps of adaptation before a client's model is scored; 0 scores the global model", low=0, tune=(1, 5))

    name = "maml"
    paper = "Per-FedAvg (Fallah et al., NeurIPS 2020), FO and HF"
    helps = ("label skew", "feature shift")
    departs = ("first order; order=hessian_free has the second derivatives, as the paper's HF",
               "α is the run's learning rate, as in PFLlib; the paper sets it by itself: alpha",
               "a batch is cut in two or three, where the paper draws as many; a scored client adapts on one batch, not on all its samples")
    scored = "after aggregation and adaptation"
    neutral = {"alpha": 0.0}

    @property
    def pieces(self) -> int:
        return (3 if self.order == "hessian_free" else 2) if self.alpha else 1

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"no global model": "looks for one start that suits all clients",
                PAIRED: "cuts a batch in pieces, in which partners would be missing"}

    def gradient(self, v: StepView, grad_at: Callable[..., Flat]) -> Flat:
        if not self.alpha:
            return grad_at(v.params)
        cut = [Batch(*some) for some in zip(*(t.tensor_split(self.pieces) for t in v.batch))]
        g = grad_at(v.params, cut[0])
        with torch.no_grad():
            rate = self.alpha * v.lr
            adapted = {**v.params, **tree.add(tree.scale(g, -rate), v.params)}
        g = grad_at(adapted, cut[1])
        if self.order == "first":
            return g
        with torch.no_grad():
            ahead, behind = ({**v.params, **tree.add(tree.scale(g, d), v.params)} for d in (self.delta, -self.delta))
        curved = tree.sub(grad_at(ahead, cut[2]), grad_at(behind, cut[2]))
        return tree.sub(g, tree.scale(curved, rate / (2 * self.delta)))

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        if not (self.alpha and self.adapt):
            return c.received, True
        return c.train(c.received, self.adapt, steps=self.adapt, pace=self.alpha), True
