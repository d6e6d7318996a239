"""FedMix and NaiveMix: mixup with averages of other clients' samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..core.client import ClientView
from ..core.method import Method
from ..core.part import Batch, Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree
from . import _pseudo_data

AT_ONCE = 32                # averages that a client makes at a time: of large pictures all would not fit into memory


@dataclass(frozen=True)
class Mix(Part):
    """Mix every batch with averages x̄, ȳ of `group` samples of one client and of their labels, from a pool that all clients get.

    form=naive is NaiveMix: the loss of (1 − λ)x + λx̄ and (1 − λ)y + λȳ. form=fedmix takes the loss to first order in x̄, at
    x' = (1 − λ)x: (1 − λ)ℓ(x', y) + λℓ(x', ȳ) + λ(1 − λ)⟨∂ℓ(x', y)/∂x', x̄⟩, each sample's own slope, mean over the batch. The step
    goes through that slope as well.
    """

    lam: float = option(0.1, "λ, weight of the averages", low=0.0, below=1.0, tune=(0.01, 0.05, 0.1, 0.2))
    form: str = option("fedmix", "to first order in the averages, or naive: mixed with them", choices=("fedmix", "naive"))
    taylor: str = option("per_sample", "slope of each sample's loss, or released: of the batch's mean, and divided by its size again",
                         choices=("per_sample", "released"))
    partner: str = option("batch", "one average for a batch (the paper's Alg. 2), or one for every row (FedBR)", choices=("batch", "row"))
    group: int = option(10, "M, samples in one average; 1 would send samples as they are", low=1)
    pool: int = option(256, "averages in the pool, of clients drawn at random", low=1)
    refresh: str = option("once", "the pool before the first round, or anew in every round from its clients", choices=("once", "round"))

    name, rank = "mix", 15                                # after mixup: its batch is what is mixed further
    paper = "FedMix (Yoon et al., ICLR 2021), Alg. 1 and 2; NaiveMix in the same paper"
    helps = ("label skew",)
    departs = ("the pool has a fixed size, and its groups are drawn with replacement; in the paper every client averages all it has",
               "the slope is each sample's own; open implementations lose a factor of the batch's size: taylor=released",
               "FedBR draws new averages from raw data in every step; refresh=round comes nearest")
    neutral = {"lam": 0.0}
    trial = {"pool": 12, "group": 3}
    reduce = {"x": "concat", "y": "concat"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"soft labels", "averages of raw samples"})

    @property
    def raw_averages(self) -> str:
        what = (f"means of {self.group} training inputs of one client and of their labels" if self.group > 1
                else "single training inputs and their labels, as they are")
        return f"{what}, sent {'before the first round' if self.refresh == 'once' else 'in every round'}; all clients get them"

    @property
    def second_order(self) -> bool:
        return self.form == "fedmix" and self.lam > 0

    def objection(self, other: Part) -> str | None:
        if self.form == "fedmix" and Method.has(other, "gradient"):
            return f"takes the gradient of a gradient, and {other.name} has a gradient of its own. Use form=naive beside it"
        if self.form == "fedmix" and self.partner == "row" and Method.has(other, "relabel"):
            return f"gives every row a label of its own average, which {other.name} would have to mix as it mixes rows. Use partner=batch"
        return None

    def require(self, spec: Spec) -> str | None:
        if spec.tokens:
            return "averages inputs, and whole numbers, as the words of a text, have no average."
        if self.form == "naive" and self.taylor != "per_sample":
            return "has no slope with form=naive, so taylor says nothing. Leave it out, or use form=fedmix."
        return None

    def init_shared(self, spec: Spec) -> Tree:
        return {"x": torch.zeros(self.pool, *spec.sample), "y": torch.zeros(self.pool, *spec.output)}

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(hook for when, hook in _pseudo_data.ASKED.items() if when != self.refresh)

    def prepare(self, c: ClientView) -> Tree:
        xs, ys = [], []
        for groups in _pseudo_data.own_groups(c, self.pool, self.group).split(AT_ONCE):
            x, y = c.take_both(groups)
            xs.append(x.mean(1))
            shares = as_probabilities(y.flatten(0, 1), c.spec.classes)
            ys.append(shares.reshape(*groups.shape, *shares.shape[1:]).mean(1))
        return {"x": torch.cat(xs), "y": torch.cat(ys)}

    def survey(self, c: ClientView) -> Tree:
        return self.prepare(c)

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return s.reduced, {}

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        return {"row": rng.integers(key, self.pool, (len(sizes), 1 if self.partner == "batch" else spec.policy.batch))}

    def _partners(self, v: StepView) -> tuple[Tensor, Tensor]:
        """x̄ and ȳ of this step: one row for all, or one for each."""
        rows = v.plan["row"][: len(v.batch.x)]
        return v.shared["x"].index_select(0, rows), v.shared["y"].index_select(0, rows)

    def batch(self, v: StepView) -> Batch:
        if not self.lam:
            return v.batch
        x = (1 - self.lam) * v.batch.x
        if self.form == "fedmix":
            return v.batch._replace(x=x.detach().requires_grad_())       # the slope is taken here
        mean, shares = self._partners(v)
        target = as_probabilities(v.batch.target, v.spec.classes)
        return v.batch._replace(x=x + self.lam * mean, target=(1 - self.lam) * target + self.lam * shares)

    def main_loss(self, v: StepView) -> Tensor:
        logits = v.trace.logits
        own = v.task_loss(logits, v.batch.target)
        if not self.second_order:
            return own
        mean, shares = self._partners(v)
        (slope,) = torch.autograd.grad(own, v.batch.x, create_graph=True)
        along = (slope * mean).sum()                      # `own` is the mean of the samples' losses, and so this of their slopes
        if self.taylor == "released":
            along = along / len(logits)
        return (1 - self.lam) * (own + self.lam * along) + self.lam * v.task_loss(logits, shares.expand_as(logits))
