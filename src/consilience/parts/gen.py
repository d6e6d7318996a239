"""FedGen: a generator of features, trained on the server against the clients' heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import rng, tree
from ..core import optimiser
from ..core.client import ClientView
from ..core.part import Part, Spec
from ..core.policy import Policy
from ..core.server import ServerView
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Flat, Tree


@dataclass(frozen=True)
class Gen(Part):
    """Clients also classify generated features of any class: + CE(h(G(y')), y'), y' drawn from all clients' labels.

    G maps [noise, one-hot y] by linear, BatchNorm on the batch's own statistics, ReLU, linear to the head's input. After
    each round the server trains it: min CE(Σ p_k h_k(G(y)), y) over the uploaded heads h_k, with an Adam that persists.
    """

    weight: float = option(1.0, "weight of the generated features", low=0.0, tune=(0.1, 0.5, 1.0))
    steps: int = option(1000, "the server's steps in a round", low=1)
    noise: int = option(512, "size of the noise, uniform in [0, 1)", low=1)
    hidden: int = option(512, "width of the generator", low=1)
    server_lr: float = option(0.005, "learning rate of the server's Adam", above=0.0)

    name, reads_models, min_batch, needs_vectors = "gen", True, 2, True
    paper = "FedGen (Zhu et al., ICML 2021), in the form DBE compares with"
    helps = ("label skew",)
    departs = ("no diversity loss, no latent term, no decay of the weight; those are the official code's",)
    neutral = {"weight": 0.0, "steps": 1, "noise": 2, "hidden": 4}
    trial = {"steps": 3, "noise": 4, "hidden": 8}
    reduce = {"labels": "sum"}

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"local head": "trains its generator against heads that clients share",
                "no global model": "trains its generator against heads that clients share",
                "a frozen random head": "teaches the head alone"}

    def init_shared(self, spec: Spec) -> Tree:
        def uniform(name: str, *shape: int) -> Tensor:
            bound = shape[-1] ** -0.5 if len(shape) > 1 else 0.0
            return (2 * rng.uniform(spec.key(self.name, name), shape) - 1) * bound
        generator = {"in.weight": uniform("in", self.hidden, self.noise + spec.classes), "in.bias": torch.zeros(self.hidden),
                     "norm.weight": torch.ones(self.hidden), "norm.bias": torch.zeros(self.hidden),
                     "out.weight": uniform("out", spec.width, self.hidden), "out.bias": torch.zeros(spec.width)}
        return {"generator": generator, "labels": torch.ones(spec.classes)}

    def init_server(self, spec: Spec) -> Tree:
        return {"adam": optimiser.init(self._adam(), self.init_shared(spec)["generator"])}

    def _adam(self) -> Policy:
        return Policy(optimiser="adam", lr=self.server_lr)

    def prepare(self, c: ClientView) -> Tree:
        return {"labels": as_probabilities(c.labels(), c.spec.classes).sum(0)}

    def _features(self, g: Flat, y: Tensor, key: Tensor, classes: int) -> Tensor:
        noise = rng.uniform(rng.key(key, "noise"), (len(y), self.noise))
        h = F.linear(torch.cat([noise, as_probabilities(y, classes)], 1), g["in.weight"], g["in.bias"])
        h = F.batch_norm(h, None, None, g["norm.weight"], g["norm.bias"], training=True)
        return F.linear(h.relu(), g["out.weight"], g["out.bias"])

    def _labels(self, counts: Tensor, key: Tensor, many: int) -> Tensor:
        """Labels drawn in proportion to the counts, by inverting their cumulative sum."""
        cumulative = counts.cumsum(0)
        drawn = rng.uniform(rng.key(key, "label"), (many,)) * cumulative[-1]
        return torch.searchsorted(cumulative, drawn).clamp(max=len(counts) - 1)

    def loss(self, v: StepView) -> Any:
        key = v.key("generated")
        y = self._labels(v.shared["labels"], key, len(v.batch.x))
        z = self._features(v.shared["generator"], y, key, v.spec.classes)
        return self.weight * F.cross_entropy(v.apply(v.spec.layout.head, z), y)

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        if s.stage == "prepare":
            return {**s.shared, "labels": s.reduced["labels"]}, s.server
        g, adam = tree.clone(s.shared["generator"]), tree.clone(s.server["adam"])
        clients = [{"params": {**s.model["params"], **m}, "buffers": s.model["buffers"]} for m in s.models]
        lr = torch.full((), self.server_lr, device=s.p.device)
        base = s.key.to(s.p.device)
        for t in range(self.steps):
            key = rng.key(base, t)
            y = self._labels(s.shared["labels"], key, s.spec.policy.batch)
            with torch.enable_grad():
                leaf = {k: w.requires_grad_() for k, w in tree.clone(g).items()}
                z = self._features(leaf, y, key, s.spec.classes)
                logits = sum(w * s.apply(s.spec.layout.head, z, m, train=True) for w, m in zip(s.p, clients))
                grads = torch.autograd.grad(F.cross_entropy(torch.as_tensor(logits), y), [*leaf.values()])
            optimiser.update(self._adam(), g, dict(zip(g, grads)), adam, lr)
        return {**s.shared, "generator": g}, {"adam": adam}
