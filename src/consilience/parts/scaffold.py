"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import tree
from ..core.client import ClientView
from ..core.correction import Correction
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import NEEDS_AVERAGE, needs_fresh_sgd


@dataclass(frozen=True)
class Scaffold(Part):
    """Correct each gradient by the difference of server and client control variates: g − c_i + c.

    After training c_i ← c_i − c + (wᵗ − w_i)/a_i, where a_i is the length of the path walked (with momentum ρ, a constant
    gradient g moves the model by a_i·g); the server adds the mean change times |S|/N. Variates cover parameters that
    travel and train; those of absent clients stay.
    """

    server_lr: float = option(1.0, "step of the server on the averaged change", above=0.0)
    divisor: str = option("path", "path: momentum-aware length; steps: K·η as first published", choices=("path", "steps"))

    name, rank = "scaffold", 40
    paper = "SCAFFOLD (Karimireddy et al., ICML 2020), option II"
    helps = ("label skew", "feature shift")
    departs = ("the divisor counts momentum; divisor=steps is the published K·η",)
    not_neutral = "it has no strength; in round one, with all variates zero, it equals FedAvg"
    reduce = {"change": "mean"}
    prefers = {"weights": "uniform"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a comparison of clients"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def require(self, spec: Spec) -> str | None:
        return needs_fresh_sgd(spec)

    def init_shared(self, spec: Spec) -> Tree:
        return {"c": tree.zeros(tree.pick(spec.model["params"], spec.trained))}

    def init_kept(self, spec: Spec) -> Tree:
        return self.init_shared(spec)

    def init_scratch(self, c: ClientView) -> Tree:
        return {"correction": tree.sub(c.shared["c"], c.kept["c"])}

    def correction(self, v: StepView) -> Correction:
        return Correction(add=v.scratch["correction"])

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        old = c.kept["c"]
        walked = tree.sub(tree.pick(c.received["params"], old), c.model["params"])
        lr = c.spec.policy.lr_at(c.round)
        length = {k: c.path[k] if self.divisor == "path" else c.moves[k] * lr for k in old}
        new = tree.sub({k: w / length[k] for k, w in walked.items()}, c.scratch["correction"])
        return {"c": new}, {"change": tree.sub(new, old)}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return {"c": tree.add(s.shared["c"], s.reduced["change"], len(s.ids) / s.population)}, {}

    def aggregate(self, s: ServerView, change: Flat) -> tuple[Flat, Tree]:
        return (change if self.server_lr == 1 else tree.scale(change, self.server_lr)), s.server
