"""FedAvgM: momentum on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import tree
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import NEEDS_AVERAGE


@dataclass(frozen=True)
class Avgm(Part):
    """Momentum on the averaged change of the parameters: v ← βv + Δ, w ← w + η v. Never on running statistics."""

    beta: float = option(0.9, "momentum", low=0.0, below=1.0, tune=(0.1, 0.3, 0.5, 0.7, 0.9, 0.99))
    server_lr: float = option(1.0, "step of the server", above=0.0)
    dampened: bool = option(False, "v ← βv + (1 − β)Δ, as in MOON's release")

    name = "avgm"
    paper = "FedAvgM (Hsu et al., 2019)"
    helps = ("label skew",)
    departs = ("FedFA's release pushes normalisation statistics through the same recursion; here parameters only",)
    neutral = {"beta": 0.0}

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def init_server(self, spec: Spec) -> Tree:
        return {"v": tree.zeros({k: p for k, p in spec.model["params"].items() if k in spec.shared})}

    def aggregate(self, s: ServerView, change: Flat) -> tuple[Flat, Tree]:
        new = tree.scale(change, 1 - self.beta) if self.dampened else change
        v = tree.add(new, s.server["v"], self.beta)
        return (v if self.server_lr == 1 else tree.scale(v, self.server_lr)), {"v": v}
