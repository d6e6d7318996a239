"""GroupDRO over clients: weigh the ones that suffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..options import option
from ..tree import Tree
from ._reasons import NEEDS_AVERAGE


@dataclass(frozen=True)
class Dro(Part):
    """A client's weight grows with its loss: q_i ← q_i·exp(η ℓ_i), weight q_i/Σ_S q. q stays with the client's number."""

    eta: float = option(0.01, "how fast weights follow losses", low=0.0, tune=(0.001, 0.01, 0.1))
    loss_of: str = option("round", "ℓ_i: mean training loss of the round, or of its first step as in FedBR's release",
                          choices=("round", "first"))

    name = "dro"
    paper = "GroupDRO (Sagawa et al., ICLR 2020), over clients as in FedBR"
    helps = ("feature shift", "label skew")
    neutral = {"eta": 0.0}
    reduce = {"loss": "stack"}
    prefers = {"weights": "uniform"}

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(() if self.eta else ("finish", "server", "weights"))        # q stays what it was: the weights are the run's

    @property
    def uploads(self) -> Mapping[str, str]:
        return self.reduce if self.eta else {}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"a comparison of clients"})

    @property
    def refuses(self) -> Mapping[str, str]:
        return NEEDS_AVERAGE

    def init_server(self, spec: Spec) -> Tree:
        return {"q": torch.ones(spec.population)}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        return c.kept, {"loss": c.losses.mean() if self.loss_of == "round" else c.losses[0]}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        q = s.server["q"]
        ids = tree.to(torch.tensor(s.ids), q.device)
        q = q.index_copy(0, ids, q[ids] * torch.exp((self.eta * s.reduced["loss"]).clamp(max=60.0)))
        # Only ratios count, and in long runs q would leave float32: a power of two over all of it changes no bit of a ratio.
        smaller = torch.ldexp(q, -torch.frexp(q.max()).exponent).clamp(min=torch.finfo(q.dtype).tiny)
        return s.shared, {"q": torch.where(q.max() > 2.0**40, smaller, q)}

    def weights(self, s: ServerView, p: Tensor) -> Tensor:
        q = s.server["q"][tree.to(torch.tensor(s.ids), p.device)]
        return q / q.sum()
