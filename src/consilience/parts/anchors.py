"""FedFM: anchors for every class, shared by all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.client import ClientView
from ..core.part import Model, Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree
from .kernels import anchors as kernel


@dataclass(frozen=True)
class Anchors(Part):
    """Match features to class anchors: the mean feature of each class over the clients, made anew every round.

    mode=guide: λ·CE(⟨ĥ, â_n⟩/τ, y), one softmax over normalised features and anchors. mode=l2: λ·‖h − a_y‖². Anchors are
    made by this round's clients with the received model. A class nobody showed keeps its anchor; one never shown takes no part.
    lite=true is FedFM-Lite: anchors are made by the trained model after training; models travel every `every` rounds.
    """

    weight: float = option(50.0, "λ, weight of the matching", low=0.0, tune=(1.0, 10.0, 50.0, 100.0))
    mode: str = option("guide", "contrastive guiding, or squared distance", choices=("guide", "l2"))
    tau: float = option(0.1, "temperature of the guiding (α in the release; not in the paper)", above=0.0)
    start: int = option(20, "T_s, rounds of plain training before matching begins", low=0, tune=(0, 5, 20))
    aggregation: str = option("weighted", "anchors weighted by class counts, or uniform over clients",
                              choices=("weighted", "uniform"))
    normalise: bool = option(True, "l2: normalise features and anchors first, as in the paper's experiments")
    l2_reduction: str = option("mean", "l2: mean over entries (release) or sum (eq. 3)", choices=("mean", "sum"))
    clients: str = option("current", "whose samples make a round's anchors: its own clients' (paper), or those of the round before "
                                     "(release)", choices=("current", "previous"))
    augmented: bool = option(False, "anchors of samples that are augmented as in training (release), not of the samples as they are")
    lite: bool = option(False, "FedFM-Lite: one handshake a round")
    every: int = option(1, "lite: models travel every so many rounds, anchors always", low=1)
    warm_exchange: bool = option(True, "lite: models travel in every round before `start`")

    name = "anchors"
    needs_vectors = True
    paper = "FedFM (Ye et al., IEEE TSP), eq. 3–5, Alg. 1"
    helps = ("label skew",)
    departs = ("anchors come from this round's clients; clients=previous is the release, the same under full participation after round 1",
               "a class absent everywhere keeps its anchor instead of becoming NaN",
               "anchors are of samples without augmentation; augmented=true is the release",
               "l2 is the normalised mean of the release by default; normalise=false, l2_reduction=sum is eq. 3")
    neutral = {"weight": 0.0}
    trial = {"start": 0, "weight": 2.0}
    reduce = {"sum": "sum", "count": "sum", "mean": "stack"}

    @property
    def uploads(self) -> Mapping[str, str]:
        """Means of every client, where they weigh the same; otherwise sums over all."""
        unused = "mean" if self.aggregation == "weighted" else "sum"
        return {k: how for k, how in self.reduce.items() if k != unused}

    @property
    def begins(self) -> int:
        return self.start + 1

    @property
    def skips_exchanges(self) -> bool:
        return self.lite and self.every > 1

    @property
    def surveys_previous(self) -> bool:
        return self.clients == "previous"

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"models that travel only now and then"}) if self.skips_exchanges else frozenset()

    def exchange(self, round_number: int) -> bool:
        if not self.lite or (self.warm_exchange and round_number <= self.start):
            return True
        return (round_number - (self.start if self.warm_exchange else 0)) % self.every == 0

    def require(self, spec: Spec) -> str | None:
        if not self.lite and (self.every != 1 or not self.warm_exchange):
            return ("lets models travel in every round but with lite=true, so every and warm_exchange say nothing. Set lite=true, or leave "
                    "them out.")
        if self.lite and self.clients == "previous":
            return "has lite=true, whose anchors come with the trained models, so clients=previous says nothing. Leave one of them out."
        return None

    def init_shared(self, spec: Spec) -> Tree:
        return {"anchor": torch.zeros(spec.classes, spec.width), "seen": torch.zeros(spec.classes, dtype=torch.bool)}

    def _class_sums(self, c: ClientView, model: Model) -> Tree:
        anchor = c.shared["anchor"]
        total, count = torch.zeros_like(anchor), anchor.new_zeros(len(anchor))
        for x, y in c.batches(augmented=self.augmented):
            hot = as_probabilities(y, len(anchor))
            total = torch.addmm(total, hot.T, c.forward(model, x).before[c.spec.features])
            count = count + hot.sum(0)
        if self.aggregation == "weighted":
            return {"sum": total, "count": count}
        has = count[:, None] > 0              # a client without the class adopts the global anchor
        return {"mean": torch.where(has, total / count.clamp(min=1)[:, None], c.shared["anchor"]), "count": count}

    def survey(self, c: ClientView) -> Tree:
        return {} if self.lite else self._class_sums(c, c.received)

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        return c.kept, self._class_sums(c, c.model) if self.lite else {}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        count = s.reduced["count"]
        if self.aggregation == "weighted":
            mean = s.reduced["sum"] / count.clamp(min=1)[:, None]
        else:
            mean = s.reduced["mean"].mean(0)
        anchor = torch.where(count[:, None] > 0, mean, s.shared["anchor"])
        return {"anchor": anchor, "seen": s.shared["seen"] | (count > 0)}, {}

    def init_scratch(self, c: ClientView) -> Tree:
        """What every step's loss needs of the anchors, made once a round; λ and T_s stand in the weights of the classes."""
        anchor, seen = c.shared["anchor"], c.shared["seen"]
        if self.mode == "guide" or self.normalise:
            anchor = F.normalize(anchor)
        strength = self.weight if c.round > self.start else 0.0
        return {"anchor": anchor / self.tau if self.mode == "guide" else anchor, "weight": strength * seen.to(anchor.dtype),
                "absent": torch.where(seen, 0.0, -1e4)}           # keeps classes without an anchor out of the softmax

    def loss(self, v: StepView) -> Any:
        anchor, weight, h = v.scratch["anchor"], v.scratch["weight"], v.features
        if self.mode == "guide":
            if kernel.usable(h, anchor):
                return kernel.guide(h, anchor, v.scratch["absent"], weight, v.batch.target)
            near = torch.addmm(v.scratch["absent"], F.normalize(h), anchor.T)
            return F.cross_entropy(near, v.batch.target, weight=weight, reduction="sum") / len(h)      # soft labels too
        return (as_probabilities(v.batch.target, v.spec.classes) * weight * self._distances(h, anchor)).sum(1).mean()

    def _distances(self, h: Tensor, anchor: Tensor) -> Tensor:
        """(B, C) squared distances of every feature to every anchor."""
        square = ((F.normalize(h) if self.normalise else h)[:, None] - anchor[None]).square()
        return square.mean(2) if self.l2_reduction == "mean" else square.sum(2)
