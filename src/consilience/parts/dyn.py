"""FedDyn: dynamic regularisation."""

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
from ._reasons import NEEDS_AVERAGE


@dataclass(frozen=True)
class Dyn(Part):
    """Make clients' optima agree with the server's: − ⟨h_i, w⟩ + (α/2)‖w − wᵗ‖², h_i ← h_i − α(w_i − wᵗ).

    The server steps w ← mean of w_i − h/α, h ← h − α(1/N)Σ(w_i − wᵗ). All h are stored divided by α, which turns the local
    term into (α/2)‖w − (wᵗ + h_i/α)‖² up to a constant, and cancels α on the server.
    """

    alpha: float = option(0.1, "strength of the local term", above=0.0, tune=(0.001, 0.01, 0.1))

    name = "dyn"
    paper = "FedDyn (Acar et al., ICLR 2021)"
    helps = ("label skew",)
    departs = ("α is the same for all clients; the official code scales it by client size and clips gradients at 10",
               "the model scored is the one broadcast; the official code scores the plain average")
    not_neutral = "the server's step does not depend on α, so no α gives FedAvg"
    prefers = {"weights": "uniform"}

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def _zeros(self, spec: Spec) -> Tree:
        return {"h": tree.zeros(tree.pick(spec.model["params"], spec.trained))}

    def init_server(self, spec: Spec) -> Tree:
        return self._zeros(spec)

    def init_kept(self, spec: Spec) -> Tree:
        return self._zeros(spec)

    def init_scratch(self, c: ClientView) -> Tree:
        return {"target": tree.add(c.kept["h"], c.received["params"])}

    def correction(self, v: StepView) -> Correction:
        return Correction(strength=self.alpha, target=v.scratch["target"])

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        moved = tree.sub(tree.pick(c.model["params"], c.kept["h"]), c.received["params"])
        return {"h": tree.sub(c.kept["h"], moved)}, {}

    def aggregate(self, s: ServerView, change: Flat) -> tuple[Flat, Tree]:
        h = tree.add(s.server["h"], tree.pick(change, s.server["h"]), -len(s.ids) / s.population)
        return {**change, **tree.sub(tree.pick(change, h), h)}, {"h": h}
