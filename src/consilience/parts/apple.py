"""APPLE: each client learns how to mix all clients' models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .. import tree
from ..core.client import ClientView
from ..core.part import Model, Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Flat, Tree
from ._reasons import OWN_MODEL, WHOLE_MODELS, bounds_changes, sends_norms

EPS = 1e-3          # what the exponential schedule has come to when it ends


@dataclass(frozen=True)
class Apple(Part):
    """A client's model is a mixture of all clients' cores, θ = Σ_j p_ij θ_j, whose weights it learns beside its own core.

    On every batch θ_i is stepped by p_ii·∇ℓ(θ) and p_ij by ⟨∇ℓ(θ), θ_j⟩ + 2λ(r)μ(p_ij − n_j/n); the cores of others stand still for
    the round. λ(r) falls from 1 to nothing, so that clients first learn together and then for themselves. The mixture is scored.
    """

    weights_lr: float = option(0.001, "learning rate of the weights p; the core has the run's", low=0.0, tune=(0.0001, 0.0003, 0.001))
    mu: float = option(0.1, "μ, pull of the weights towards the clients' shares of samples", low=0.0, tune=(0.001, 0.01, 0.1, 1.0))
    fade: int = option(20, "rounds in which the pull fades; a tenth of the run in the release", low=0, tune=(0, 10, 20, 50))
    schedule: str = option("exponential", "how the pull fades", choices=("exponential", "cosine"))
    core_steps: str = option("paper", "steps of the core: paper, by p_ii·∇ℓ; scaled: N times as long, as in PFLlib, for p_ii is about 1/N",
                             choices=("paper", "scaled"))

    name = "apple"
    paper = "APPLE (Luo and Wu, IJCAI 2022)"
    helps = ("label skew", "feature shift")
    departs = ("all cores are sent to every client; the paper also limits how many",
               "μ has no ½ before it, as in the release",
               "PFLlib, which DBE compares with, has steps of the core N times as long: core_steps=scaled")
    scored = "after local training, before the others' new cores arrive"
    not_neutral = "it has no global model"
    reduce = {"size": "sum", "core": "stack"}
    trial = {"weights_lr": 0.01}

    @property
    def claims(self) -> Mapping[str, str]:
        return {"question of what travels": "sends every client's core to all others"}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"no global model", "local head", "personal models", "a comparison of clients", WHOLE_MODELS,
                          OWN_MODEL})

    def objection(self, other: Part) -> str | None:
        return bounds_changes(other)

    def require(self, spec: Spec) -> str | None:
        if spec.population < 2:
            return "needs at least two clients."
        if spec.policy.cohort_size(spec.population) < spec.population:
            return "learns weights of all clients' cores, which must be of the round before: all clients take part. Use participation=1."
        return sends_norms(spec)

    def share(self, key: str, spec: Spec) -> bool:
        return False

    def init_shared(self, spec: Spec) -> Tree:
        return {"share": torch.zeros(spec.population)}

    def init_server(self, spec: Spec) -> Tree:
        return {"cores": tree.map(lambda p: p.expand(spec.population, *p.shape), spec.model["params"])}

    def init_kept(self, spec: Spec) -> Tree:
        return {"p": torch.zeros(spec.population), "mixture": spec.model["params"]}

    def prepare(self, c: ClientView) -> Tree:
        size = torch.zeros_like(c.shared["share"])
        size[c.id] = float(c.size if c.schedule else 0)           # who makes no step never has more than the initial core
        return {"size": size}

    def deliver(self, s: ServerView, client: int) -> Tree:
        return tree.map(lambda t: torch.cat([t[:client], t[client + 1:]]), s.server["cores"])

    def receive(self, c: ClientView) -> tuple[Flat, Tree]:
        trained = {k for phase, _ in c.schedule if phase.model == "model" for k in phase.keys}
        own = torch.zeros_like(c.shared["share"])
        own[c.id] = 1.0
        with_gap = lambda t: torch.cat([t[: c.id], torch.zeros_like(t[:1]), t[c.id:]])         # its own core it trains itself
        pull = own.new_full((), 2 * self.mu * self._fading(c.round - 1))
        return c.received["params"], {"cores": {k: with_gap(t) for k, t in c.download.items() if k in trained}, "own": own, "pull": pull,
                                      "p": c.shared["share"] if c.first else c.kept["p"]}

    def _fading(self, done: int) -> float:
        """λ(r)."""
        if done >= self.fade:
            return 0.0
        return EPS ** (done / self.fade) if self.schedule == "exponential" else (1 + math.cos(math.pi * done / self.fade)) / 2

    def _mixture(self, scratch: Tree, core: Flat) -> Flat:
        mine = scratch["p"] @ scratch["own"]
        return {k: mine * core[k] + torch.tensordot(scratch["p"], others, 1) for k, others in scratch["cores"].items()}

    def gradient(self, v: StepView, grad_at: Callable[[Flat], Flat]) -> tuple[Flat, Tree]:
        p, own = v.scratch["p"], v.scratch["own"]
        with torch.no_grad():
            mixture = self._mixture(v.scratch, v.params)
        g = grad_at({**v.params, **mixture})
        with torch.no_grad():
            along = [v.scratch["cores"][k].flatten(1) @ t.flatten() + own * (v.params[k] * t).sum() for k, t in g.items()]
            slope = torch.stack(along).sum(0) + v.scratch["pull"] * (p - v.shared["share"])
            longer = len(p) if self.core_steps == "scaled" else 1
            return tree.scale(g, longer * (p @ own)), {**v.scratch, "p": p - self.weights_lr * slope}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        core = c.model["params"]
        return {"p": c.scratch["p"], "mixture": {**core, **self._mixture(c.scratch, core)}}, {"core": core}

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        return (c.received if c.first else {**c.received, "params": c.kept["mixture"]}), True

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        if s.stage == "prepare":
            return {"share": s.reduced["size"] / s.reduced["size"].sum()}, s.server
        ids = tree.to(torch.tensor(s.ids), s.shared["share"].device)
        return s.shared, {"cores": tree.map(lambda known, new: known.index_copy(0, ids, new), s.server["cores"], s.reduced["core"])}
