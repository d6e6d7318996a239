"""DBE's mean regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import rng, tree
from ..core.client import ClientView
from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree
from .kernels import mr as kernel


@dataclass(frozen=True)
class Mr(Part):
    """Pull the running mean of the representation to a mean agreed on before round one.

    r ← (1 − μ) r + μ·mean_b z_g, from 0 in every round; + κ·½·mean (r − g)². Before round one every client trains the task
    for one epoch and uploads the mean of its representations; g is their average by samples and stays for the whole run.
    """

    kappa: float = option(1.0, "κ, weight of the regularisation", low=0.0, tune=(0.1, 1.0, 5.0, 10.0, 50.0))
    momentum: float = option(1.0, "μ, share of the current batch in the running mean", above=0.0, high=1.0, tune=(0.1, 0.5, 1.0))
    at: str = option("features", "the point: features (what enters the head), or the name of a module")
    init_mean: str = option("pass", "a client's mean: a pass over its data after the epoch, or the running mean at its end",
                            choices=("pass", "running"))
    init_epochs: int = option(1, "epochs of plain training before the mean is taken", low=0)
    half: bool = option(True, "½·MSE as in the release, with which the paper's κ were used; false: MSE")
    bias_correct: bool = option(False, "correct the running mean for its start at 0")
    noise_scale: float = option(0.0, "s of Table 3: standard deviation of the noise on a client's mean", low=0.0)
    noise_mix: float = option(0.0, "q of Table 3: the mean is scaled by 1 − q before the noise", low=0.0, high=1.0)

    name = "mr"
    paper = "DBE (Zhang et al., NeurIPS 2023), eq. 4–6 and section 4.3"
    helps = ("label skew", "feature shift")
    departs = ("the initial mean is a proper pass over the client's data; init_mean=running is the release",
               "Table 3's noise follows FedPCL's code, which the text names: (1 − q)·mean + noise")
    neutral = {"kappa": 0.0}
    reduce = {"total": "sum", "count": "sum"}

    @property
    def privacy(self) -> str:
        if not (self.noise_scale or self.noise_mix):
            return "none: the mean of a client's representations is uploaded as it is, once, with the number of its samples"
        return ("noise on the mean of a client's representations (Table 3), once, before the upload: it blurs what the mean shows. The "
                "mean is not clipped, so that no (ε, δ) follows; the number of samples and the models carry no noise")

    @property
    def strength(self) -> float:
        return (0.5 if self.half else 1.0) * self.kappa

    def point(self, layout: Layout) -> str:
        return layout.features if self.at == "features" else self.at

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (self.point(layout),)

    def require(self, spec: Spec) -> str | None:
        if self.init_mean == "running" and not self.init_epochs:
            return "needs an epoch for a running mean. Set init_epochs to 1 or more, or use init_mean=pass."
        return None

    def init_shared(self, spec: Spec) -> Tree:
        return {"mean": torch.zeros(spec.shapes[self.point(spec.layout)])}

    def init_scratch(self, c: ClientView) -> Tree:
        return {"mean": torch.zeros_like(c.shared["mean"]), "steps": torch.zeros((), device=c.shared["mean"].device)}

    def prepare(self, c: ClientView) -> Tree:
        mean, count = self._mean_of_pass(c) if self.init_mean == "pass" else self._running_mean(c)
        if self.noise_scale or self.noise_mix:
            noise = tree.to(rng.normal(c.key, mean.shape), mean.device)
            mean = (1 - self.noise_mix) * mean + self.noise_scale * noise
        return {"total": mean * count, "count": mean.new_full((), count)}

    def _mean_of_pass(self, c: ClientView) -> tuple[Tensor, int]:
        model = c.train(c.received, self.init_epochs) if self.init_epochs else c.received
        total = torch.zeros_like(c.shared["mean"])
        for x, _ in c.batches():
            total = total + c.forward(model, x).before[self.point(c.spec.layout)].sum(0)
        return total / c.size, c.size

    def _running_mean(self, c: ClientView) -> tuple[Tensor, int]:
        mean = torch.zeros_like(c.shared["mean"])
        rows = c.train_watching(c.received, self.point(c.spec.layout), self.init_epochs)
        for row in rows:
            mean = (1 - self.momentum) * mean + self.momentum * row
        return mean, c.size if len(rows) else 0          # without a step there is no running mean, and no weight

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return {"mean": s.reduced["total"] / s.reduced["count"]}, {}

    def _in_one(self, v: StepView) -> tuple[Tensor, Tensor, Tensor] | None:
        """Mean, steps and loss by one kernel, where it can."""
        z, mean = v.trace.before[self.point(v.spec.layout)], v.scratch["mean"]
        if self.bias_correct or not kernel.usable(z, mean):
            return None
        return kernel.regularise(z, mean, v.shared["mean"], v.scratch["steps"], self.momentum, self.strength)

    def track(self, v: StepView) -> Tree:
        done = v.once("step", lambda: self._in_one(v))
        if done is not None:
            return {"mean": done[0], "steps": done[1]}
        now = v.trace.before[self.point(v.spec.layout)].mean(0)
        return {"mean": (1 - self.momentum) * v.scratch["mean"] + self.momentum * now, "steps": v.scratch["steps"] + 1}

    def loss(self, v: StepView) -> Any:
        done = v.once("step", lambda: None)               # nothing where this phase does not track
        if done is not None:
            return done[2]
        mean, steps = v.scratch["mean"], v.scratch["steps"]
        if self.bias_correct:
            mean = mean / (1 - (1 - self.momentum) ** steps.clamp(min=1))
        term = self.strength * F.mse_loss(mean, v.shared["mean"])
        return torch.where(steps > 0, term, 0.0)          # no step tracked yet: a phase whose keys stay at home, as FedRep's head
