"""FedCM: the server's last direction in every local step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .. import tree
from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import NEEDS_AVERAGE, needs_fresh_sgd


@dataclass(frozen=True)
class Cm(Part):
    """Mix each gradient with the mean direction of the last round: αg + (1 − α)Δ; plain steps in the first round."""

    alpha: float = option(0.1, "share of the client's own gradient", above=0.0, high=1.0, tune=(0.05, 0.1, 0.3, 0.5))

    name, rank = "cm", 60
    paper = "FedCM (Xu et al., 2021)"
    helps = ("label skew",)
    departs = ("the first round takes plain steps, not steps scaled by α",
               "local momentum on top of Δ doubles the momentum; the run's momentum is left as it is set")
    neutral = {"alpha": 1.0}
    reduce = {"direction": "mean"}
    prefers = {"weights": "uniform"}              # as in Δ: in the paper one mean over the clients is both

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def require(self, spec: Spec) -> str | None:
        return needs_fresh_sgd(spec)

    def init_shared(self, spec: Spec) -> Tree:
        zeros = tree.zeros(tree.pick(spec.model["params"], spec.trained))
        return {"direction": zeros, "alpha": torch.ones(())}

    def grad(self, v: StepView, g: Flat) -> Flat:
        common = [k for k in g if k in v.shared["direction"]]
        if not common:
            return g
        a = v.shared["alpha"]
        mine, theirs = tree.pick(g, common), tree.pick(v.shared["direction"], common)
        return {**g, **tree.add(tree.scale(mine, a), tree.scale(theirs, 1 - a))}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        walked = tree.sub(tree.pick(c.received["params"], c.shared["direction"]), c.model["params"])
        return c.kept, {"direction": {k: w / c.path[k] for k, w in walked.items()}}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return {"direction": s.reduced["direction"], "alpha": torch.full_like(s.shared["alpha"], self.alpha)}, {}
