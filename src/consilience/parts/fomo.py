"""FedFomo: each client mixes the models that help it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tree
from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import WHOLE_MODELS, bounds_changes, sends_norms


@dataclass(frozen=True)
class Fomo(Part):
    """A client weighs other clients' models by how much they lower its loss on held-back samples, per distance.

    u_n = (ℓ(θ_old) − ℓ(θ_n)) / (‖θ_n − θ_old‖ + 1e-5), θ_old the client's model before its last training; weights are the
    positive u over their sum, and its own trained model is a candidate. The server remembers who helped whom and sends
    the `download` most promising models. A fifth of each client's samples is held back.
    """

    download: int = option(5, "M, models sent to a client", low=1, tune=(2, 5, 10))

    name, reserve = "fomo", 0.2
    paper = "FedFomo (Zhang et al., ICLR 2021), eq. 3"
    helps = ("label skew",)
    departs = ("the M highest affinities are sent, without ε-greedy draws",)
    scored = "after local training, before mixing"
    not_neutral = "it has no global model"
    reduce = {"model": "stack", "gain": "stack"}
    trial = {"download": 2}

    @property
    def claims(self) -> Mapping[str, str]:
        return {"question of what travels": "sends whole models to chosen clients"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"no global model", "local head", "personal models", "a comparison of clients", WHOLE_MODELS})

    def objection(self, other: Part) -> str | None:
        return bounds_changes(other)

    def require(self, spec: Spec) -> str | None:
        return "needs at least two clients." if spec.population < 2 else sends_norms(spec)

    def share(self, key: str, spec: Spec) -> bool:
        return False

    def init_server(self, spec: Spec) -> Tree:
        store = tree.map(lambda p: p.new_zeros((spec.population, *p.shape)), spec.model["params"])
        return {"models": store, "has": torch.zeros(spec.population), "affinity": torch.eye(spec.population)}

    def init_kept(self, spec: Spec) -> Tree:
        return {"before": spec.model["params"]}

    def deliver(self, s: ServerView, client: int) -> Tree:
        others = s.server["has"].clone()
        others[client] = 0.0                                  # its own model it has itself
        many = min(self.download, int(others.sum()))
        best = torch.where(others > 0, s.server["affinity"][client], -torch.inf).argsort(descending=True, stable=True)[:many]
        return {"models": tree.map(lambda t: t[best], s.server["models"]), "who": best} if many else {}

    def receive(self, c: ClientView) -> tuple[Flat, Tree]:
        old, own = c.kept["before"], c.received["params"]
        held = list(c.batches(reserved=True))

        def at(params: Flat) -> Tensor:
            total = sum(F.cross_entropy(c.forward({**c.received, "params": params}, x).logits, y, reduction="sum") for x, y in held)
            return torch.as_tensor(total / max(sum(len(y) for _, y in held), 1))

        def gain(params: Flat) -> Tensor:
            return (at(old) - at(params)) / (torch.as_tensor(tree.sq_dist(params, old)).sqrt() + 1e-5)
        who = c.download.get("who", torch.zeros(0, dtype=torch.int64, device=c.labels().device))
        others = [tree.map(lambda t, m=m: t[m], c.download["models"]) for m in range(len(who))]
        gains = torch.stack([gain(m) for m in [*others, own]])
        weights = gains.clamp(min=0)
        total = weights.sum()
        parts = weights / total.clamp(min=1e-12)
        mixed = {k: sum((w * m[k] for w, m in zip(parts, [*others, own])), torch.zeros_like(own[k])) for k in own}
        row = gains.new_zeros(c.spec.population).index_add(0, who, gains[:-1])
        return tree.map(lambda a, b: torch.where(total > 0, a, b), mixed, own), {"gain": row}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        return {"before": c.received["params"]}, {"model": c.model["params"], "gain": c.scratch["gain"]}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        ids = tree.to(torch.tensor(s.ids), s.reduced["gain"].device)
        store = tree.map(lambda known, new: known.index_copy(0, ids, new), s.server["models"], s.reduced["model"])
        return s.shared, {"models": store, "has": s.server["has"].index_fill(0, ids, 1.0),
                          "affinity": s.server["affinity"].index_add(0, ids, s.reduced["gain"])}
