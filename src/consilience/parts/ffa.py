"""FedFA: augment feature statistics by their spread over samples and clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import rng, tree
from ..core.client import ClientView
from ..core.layout import Layout
from ..core.network import in_float32
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree
from . import _mixing
from .kernels import ffa as kernel

EPS = 1e-6


@dataclass(frozen=True)
class Ffa(Part):
    """Jitter the channel statistics of feature maps (B, Ch, H, W) after each chosen stage, with probability p.

    X̂ = σ̂·(X − μ)/σ + μ̂ with μ̂ = μ + ε Σ̂_μ, σ̂ = σ + ε Σ̂_σ per sample and channel, Σ̂² = (γ + 1)·V. V is the variance of
    the statistic over the batch, γ = Ch·r/Σr with r = v/(1 + v) its variance v over clients, which the server finds from
    the clients' momentum statistics. Nothing happens in evaluation, in a batch of one, or where the coin says no.
    """

    p: float = option(0.5, "chance that a stage is augmented in a step", low=0.0, high=1.0, tune=(0.3, 0.5, 0.7))
    momentum: float = option(0.99, "α of the momentum statistics", low=0.0, below=1.0)
    stages: tuple[int, ...] = option((), "which stages, counted from 1; empty for all")
    sharing: str = option("per_channel", "per_channel: the paper; scalar: the release, whose γ is always 1; "
                                         "direct: Σ̂² = (Vs + 1)V; none: FedFA-C, Σ̂² = V; random: FedFA-R, Σ̂ = 0.5",
                          choices=("per_channel", "scalar", "direct", "none", "random"))
    stats: str = option("kept", "a client's momentum statistics between rounds: kept (text), reset (Alg. 1), averaged (release)",
                        choices=("kept", "reset", "averaged"))
    unbiased: bool = option(True, "divide variances in the layer by n − 1 (release), not n (paper)")
    bias_correct: bool = option(False, "correct uploaded statistics for their start at 0 and 1")

    name, rank, narrow_maps = "ffa", 30, True
    paper = "FedFA (Zhou and Konukoglu, ICLR 2023), eq. 3–9"
    helps = ("feature shift",)
    departs = ("variances over clients are per channel (eq. 5); the release takes one scalar, so that γ ≡ 1: sharing=scalar",
               "momentum statistics are kept per client; stats=reset is Alg. 1, stats=averaged the release")
    neutral = {"p": 0.0}
    trial = {"p": 1.0}
    reduce = {"stats": "stack", "left": "stack"}
    prefers = {"weights": "uniform"}

    def _chosen(self, layout: Layout) -> tuple[str, ...]:
        return _mixing.chosen(layout, self.stages, self.name)

    @property
    def uploads(self) -> Mapping[str, str]:
        return self.reduce if self.bias_correct else {"stats": self.reduce["stats"]}

    def points(self, layout: Layout) -> tuple[str, ...]:
        return self._chosen(layout)

    def require(self, spec: Spec) -> str | None:
        return _mixing.no_spread(spec, self._chosen(spec.layout), self.name)

    def _each(self, spec: Spec, mean: float, std: float) -> Tree:
        fill = lambda q, value: torch.full((spec.shapes[q][0],), value)
        return {q: {"mean": fill(q, mean), "std": fill(q, std)} for q in self._chosen(spec.layout)}

    def _fresh(self, spec: Spec) -> Tree:
        """Momentum statistics at their start. `left` is the weight that the start still has in them."""
        return {"stats": self._each(spec, 0.0, 1.0), "left": {q: torch.ones(()) for q in self._chosen(spec.layout)}}

    def init_shared(self, spec: Spec) -> Tree:
        shared = {"variance": self._each(spec, 1.0, 1.0)}
        return {**shared, "start": self._fresh(spec)} if self.stats == "averaged" else shared

    def init_kept(self, spec: Spec) -> Tree:
        return self._fresh(spec) if self.stats == "kept" else {}

    def init_scratch(self, c: ClientView) -> Tree:
        return {"kept": c.kept, "averaged": c.shared.get("start")}.get(self.stats) or self._fresh(c.spec)

    def _spread(self, variance: Tensor, over_clients: Tensor) -> Tensor:
        """Σ̂ per statistic and channel from the variance over the batch and over the clients."""
        if self.sharing == "random":
            return torch.full_like(variance, 0.5)
        if self.sharing == "none":
            return variance.sqrt()
        if self.sharing == "direct":
            return ((over_clients + 1) * variance).sqrt()
        r = 1 / (1 + 1 / (over_clients + EPS))
        return ((r * (r.shape[-1] / r.sum(-1, keepdim=True)) + 1) * variance).sqrt()

    def tap(self, v: StepView, point: str, x: Tensor) -> Any:
        """The augmented map; as notes, the momentum statistics after this step."""
        if not v.train or len(x) < 2 or point not in v.shared["variance"]:
            return x
        over, old, left = v.shared["variance"][point], v.scratch["stats"][point], v.scratch["left"][point]
        if kernel.usable(x):                                       # it reads and writes both types
            return kernel.jitter(x, v.unfolded(point), over, old, left, self.p, self.momentum, self.sharing, self.unbiased, EPS)
        x, correction = in_float32(x), int(self.unbiased)
        var, mean = torch.var_mean(x, (2, 3), correction=correction)
        now = torch.stack([mean, (var + EPS).sqrt()])                 # statistic × sample × channel
        # all draws of the stage at once: the coin, and noise for both statistics
        drawn = rng.uniform(v.key(point), (4 * mean.numel() + 1,))
        noise = rng.box_muller(*drawn[1:].reshape(2, 2, *mean.shape).unbind())
        over_clients = torch.stack([over["mean"], over["std"]])
        new = now + self._spread(now.var(1, correction=correction) + EPS, over_clients)[:, None] * noise
        ratio = new[1] / now[1]
        jittered = x * ratio[:, :, None, None] + (new[0] - now[0] * ratio)[:, :, None, None]
        on = drawn[0] < self.p
        seen = dict(zip(("mean", "std"), now.detach().mean(1)))
        rate = torch.where(on, 1 - self.momentum, 0.0)
        moved = {kind: torch.lerp(old[kind], seen[kind], rate) for kind in old}
        return torch.where(on, jittered, x), {"stats": moved, "left": torch.where(on, self.momentum * left, left)}

    def track(self, v: StepView) -> Tree:
        notes = v.notes                                   # none in a batch of one
        return {kind: {q: notes[q][kind] for q in v.scratch[kind]} for kind in ("stats", "left")} if notes else v.scratch

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        kept = c.scratch if self.stats == "kept" else {}
        return kept, c.scratch if self.bias_correct else {"stats": c.scratch["stats"]}

    def _corrected(self, stats: Tree, left: Tree) -> Tree:
        """Statistics without what is left of their start; untouched where nothing was added yet."""
        rest = {q: n.clamp(max=self.momentum)[:, None] for q, n in left.items()}
        return {q: {"mean": pair["mean"] / (1 - rest[q]), "std": (pair["std"] - rest[q]) / (1 - rest[q])}
                for q, pair in stats.items()}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        shared = dict(s.shared)
        if self.stats == "averaged":                      # left averages like the statistics: both are linear in the start
            shared["start"] = {**s.shared["start"], **tree.map(lambda x: x.mean(0), s.reduced)}
        stats = s.reduced["stats"]                        # clients × channels
        stats = self._corrected(stats, s.reduced["left"]) if self.bias_correct else stats
        if len(s.ids) > 1:                                # one client has no spread: the last one stays
            whole = lambda x: x.var().expand(x.shape[1]).clone()
            shared["variance"] = tree.map(whole if self.sharing == "scalar" else lambda x: x.var(0, unbiased=False), stats)
        return shared, {}
