"""APFL: a personal model that is mixed with the shared one, as far as that helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..core.client import ClientView
from ..core.method import Method
from ..core.part import Model, Part, Spec
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat, Tree


def mixture(alpha: Tensor, own: Flat, shared: Flat) -> Flat:
    """αv + (1 − α)w."""
    return tree.add(tree.scale(own, alpha), tree.scale(shared, 1 - alpha))


@dataclass(frozen=True)
class Apfl(Part):
    """A client is served by v̄ = αv + (1 − α)w. In every step w descends ℓ(w), and on the same batch v ← v − ηα∇ℓ(v̄),
    α ← α − η⟨v − w, ∇ℓ(v̄)⟩ within [0, 1]. w is averaged; v and α are the client's own.
    """

    alpha: float = option(0.5, "α at the start, share of the client's own model", low=0.0, high=1.0, tune=(0.25, 0.5, 0.75))
    adapt: str = option("step", "when α moves: in every step, in the first of a round, or never", choices=("step", "round", "never"))

    name = "apfl"
    scored = "after their own local training"
    paper = "APFL (Deng et al., 2020), algorithm 1"
    helps = ("label skew", "feature shift")
    departs = ("PFLlib's rule is not offered: v descends ℓ(v), α has a mixed gradient with a decay, v becomes v̄ after the round, α from 1",
               "v takes plain SGD steps with the run's learning rate, without momentum and weight decay")
    neutral = {}        # at any setting: the global model is FedAvg's

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"personal models", "a separate personal model"})

    @property
    def refuses(self) -> Mapping[str, str]:
        reason = "mixes a client's own model with one that all clients share and train as a whole"
        return {"local head": reason, "no global model": reason}

    def objection(self, other: Part) -> str | None:
        if Method.has(other, "relabel"):
            return f"passes batches through its own model as they are, and {other.name} mixes labels because it mixed features"
        if other.second_order:
            return f"steps its own model by the task's loss, and {other.name} has inputs that are meant for a loss of its own"
        return None

    def init_kept(self, spec: Spec) -> Tree:
        return {"own": spec.model, "alpha": torch.tensor(self.alpha), "mixture": spec.model["params"]}

    def init_scratch(self, c: ClientView) -> Tree:
        return {"own": c.kept["own"], "alpha": c.kept["alpha"], "begins": torch.ones_like(c.kept["alpha"])}

    def track(self, v: StepView) -> Tree:
        alpha, own, w = v.scratch["alpha"], v.scratch["own"], v.params
        keys = [k for k, p in w.items() if p.requires_grad]
        with torch.no_grad():
            mixed = mixture(alpha, own["params"], w)
        for k in keys:
            mixed[k].requires_grad_()
        seen = v.forward({"params": mixed, "buffers": own["buffers"]}, v.batch.x, train=True, label=self.name, learn=True)
        loss = v.task_loss(seen.logits, v.batch.target)
        g = dict(zip(keys, torch.autograd.grad(loss, [mixed[k] for k in keys], materialize_grads=True)))
        with torch.no_grad():
            params = {**own["params"], **tree.add(tree.scale(g, -v.lr * alpha), own["params"])}
            apart = tree.sub(tree.pick(own["params"], keys), w)
            slope = torch.stack([t.sum() for t in torch._foreach_mul([*apart.values()], [*g.values()])]).sum()
            moves = {"step": 1.0, "round": v.scratch["begins"], "never": 0.0}[self.adapt]
            alpha = (alpha - v.lr * moves * slope).clamp(0, 1)
        return {"own": {"params": params, "buffers": seen.buffers}, "alpha": alpha, "begins": torch.zeros_like(alpha)}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        own, alpha = c.scratch["own"], c.scratch["alpha"]
        return {"own": own, "alpha": alpha, "mixture": mixture(alpha, own["params"], c.model["params"])}, {}

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        return {"params": c.kept["mixture"], "buffers": c.kept["own"]["buffers"]}, False
