"""MixStyle: samples of a batch lend each other their style."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree
from . import _mixing

EPS = 1e-6


@dataclass(frozen=True)
class MixStyle(Part):
    """Mix the channel statistics of feature maps (B, Ch, H, W) with those of a partner in the batch, after each chosen stage.

    x̂ = (λσ + (1 − λ)σ')·(x − μ)/σ + λμ + (1 − λ)μ', λ ~ Beta(α, α) for every sample; μ and σ are per sample and channel, and constants
    on the way back. Each stage has its own coin, partners and λ. Labels stay. Nothing happens in evaluation, or in a batch of one.
    """

    p: float = option(0.5, "chance that a stage is mixed in a step", low=0.0, high=1.0, tune=(0.3, 0.5, 0.7))
    alpha: float = option(0.1, "of the Beta distribution; 0 mixes nothing", low=0.0, tune=(0.1, 0.2, 0.3))
    stages: tuple[int, ...] = option((), "which stages, counted from 1; empty for the first two")

    name, rank = "mixstyle", 20                           # before ffa, whose statistics see what was mixed
    paper = "MixStyle (Zhou et al., ICLR 2021); in FedFA inside one client's batch"
    helps = ("feature shift",)
    departs = ("partners are drawn from the client's own batch; the paper also pairs samples of two domains, of which a client has one",)
    neutral = {"p": 0.0}
    trial = {"p": 1.0}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({_mixing.PAIRED})

    def points(self, layout: Layout) -> tuple[str, ...]:
        return _mixing.chosen(layout, self.stages, self.name, "the first two", 2)

    def require(self, spec: Spec) -> str | None:
        return _mixing.no_spread(spec, self.points(spec.layout), self.name)

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        stages = self.points(spec.layout)
        shape = (len(sizes), len(stages))
        return {"on": _mixing.coins(key, self.p, *shape), "weight": _mixing.weights(key, self.alpha, *shape, spec.policy.batch),
                "order": torch.stack([_mixing.partners(rng.key(key, q), spec, sizes) for q in stages], 1)}

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        plan, stages = v.once("plan", lambda: v.plan), self.points(v.spec.layout)
        if not v.train or not plan or point not in stages or len(x) < 2:
            return x
        on, weight, order = (plan[kind][stages.index(point)] for kind in ("on", "weight", "order"))
        var, mean = torch.var_mean(x.detach(), (2, 3))
        std = (var + EPS).sqrt()
        mix = lambda s: _mixing.mixed(s, weight[: len(x), None], order[: len(x)])
        ratio = mix(std) / std
        shift = mix(mean) - mean * ratio
        return torch.where(on, x * ratio[:, :, None, None] + shift[:, :, None, None], x)
