"""FedNova: weigh clients by the steps they made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..tree import Tree
from ._reasons import NEEDS_AVERAGE, needs_fresh_sgd


@dataclass(frozen=True)
class Nova(Part):
    """Normalise each client's change by its path length a_i, then step by the average length.

    w ← w − τ_eff Σ p_i Δ_i/a_i with τ_eff = Σ p_i a_i, so client i's weight becomes p_i τ_eff / a_i. With momentum ρ,
    a_i = (K − ρ(1 − ρ^K)/(1 − ρ))/(1 − ρ); K without.
    """

    name = "nova"
    paper = "FedNova (Wang et al., NeurIPS 2020)"
    helps = ("quantity skew",)
    departs = ("with a proximal term the official a_i is Σ(1 − ημ)^j; here it is the momentum-aware number of steps",)
    not_neutral = "it has no strength; it equals FedAvg where all clients make the same number of steps"
    reduce = {"length": "stack"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a comparison of clients"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def require(self, spec: Spec) -> str | None:
        return needs_fresh_sgd(spec)

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        # All keys that travel train in the same phases, so that one length serves them all.
        key = next(k for k in c.spec.trained if k in c.path)
        length = c.path[key] / c.spec.policy.lr_at(c.round)
        return c.kept, {"length": c.losses.new_full((), length)}

    def weights(self, s: ServerView, p: Tensor) -> Tensor:
        a = s.reduced["length"]
        return p * ((p * a).sum() / a)
