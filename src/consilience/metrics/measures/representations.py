"""Measures of features: description length, clusters, silhouette."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import rng
from ...options import option
from ..clusters import nmi, silhouette
from ..gather import Answers
from ..mdl import Probe, mdl
from ..registry import Measure, register
from ..subject import MODELS, ROWS, TRAINING, Subject

_POINT = "where: features (what the head receives), logits, or a module's name"
_MODEL = "global: personal tensors left out (DBE's z_g); personalised: as served (DBE's z); auto: global where there is one"


@register
@dataclass(frozen=True)
class Mdl(Measure):
    """Description length of the labels given the features of all clients pooled, prequential and right-endpoint, bits and nats."""

    name = "mdl"
    needs = ("classification",)
    quick = False
    resumable = True
    formula = "right endpoint Σ_i (n_i − n_{i−1}) L(n_i); prequential n_1 ln C + Σ_{i>1} (n_i − n_{i−1}) L(n_{i−1})"
    n: int | None = option(None, "samples drawn, so that runs can be compared; none: all", low=23)
    points: int = option(10, "sizes of the loss-data curve", low=2)
    seeds: int = option(5, "subsets and probes at each size", low=1)
    steps: int = option(4000, "steps of a probe", low=1)
    batch: int = option(256, "samples in a probe's batch", low=1)
    lr: float = option(1e-4, "the probe's learning rate (Adam)", above=0.0)
    hidden: int = option(512, "units in each of the probe's two hidden layers", low=1)
    precision: str = option("float32", "of the probe's products; bfloat16 takes about half the time", choices=("float32", "bfloat16"))
    model: str = option("auto", _MODEL, choices=MODELS)
    training: str = option("before", "before the next round's local training, or after it", choices=TRAINING)
    rows: str = option("auto", "which samples; auto: clients' test samples, else the global test set", choices=ROWS)
    point: str = option("features", _POINT)

    def missing(self, s: Subject) -> str | None:
        rows = s.choose_rows(self.rows)
        return s.no_rows(rows) or s.no_model(s.choose_model(self.model, self.training), self.training)

    def measure(self, s: Subject) -> dict[str, Any]:
        rows, model = s.choose_rows(self.rows), s.choose_model(self.model, self.training)
        answers = s.answers(model, self.training, rows, self.point)
        device = s.fed.device
        out = mdl(answers.values.to(device), answers.y.to(device), s.data.classes, s.key("mdl"), n=self.n, points=self.points,
                  seeds=self.seeds, probe=Probe(self.steps, self.batch, self.lr, self.hidden, self.precision),
                  tell=lambda done, of: s.tell("probe steps", done, of), found=s.halfway, keep=s.halfway.save)
        return {**out, "scored": s.described(model, self.training, rows), "point": self.point}


@dataclass(frozen=True)
class _Clustered(Measure):
    """Features of some samples of every client."""

    model: str = option("auto", _MODEL, choices=MODELS)
    training: str = option("before", "before the next round's local training, or after it", choices=TRAINING)
    rows: str = option("auto", "which samples; auto: clients' validation samples, else their test samples, else the global test set",
                       choices=ROWS)
    point: str = option("features", _POINT)
    per_client: int = option(200, "samples drawn of each client (and of the global test set)", low=2)
    normalise: bool = option(False, "scale every feature vector to length one")

    def chosen_rows(self, s: Subject) -> str:
        return "validation" if self.rows == "auto" and s.count("validation") else s.choose_rows(self.rows)

    def missing(self, s: Subject) -> str | None:
        return s.no_rows(self.chosen_rows(s)) or s.no_model(s.choose_model(self.model, self.training), self.training)

    def drawn(self, s: Subject) -> Answers:
        answers = s.answers(s.choose_model(self.model, self.training), self.training, self.chosen_rows(s), self.point)
        picked = []
        for owner in answers.owner.unique().tolist():
            own = torch.nonzero(answers.owner == owner).flatten()
            picked.append(own[rng.permutation(s.key("drawn", owner), len(own))[: self.per_client].sort().values])
        return answers.pick(torch.cat(picked))

    def about(self, s: Subject, answers: Answers) -> dict[str, Any]:
        scored = s.described(s.choose_model(self.model, self.training), self.training, self.chosen_rows(s))
        return {"samples": len(answers), "scored": scored, "point": self.point}

    def seed(self, s: Subject) -> int:
        """For k-means, which wants 32 bits."""
        return int(s.key("k-means")) % (1 << 32)


@register
@dataclass(frozen=True)
class Nmi(_Clustered):
    """Normalised mutual information between labels and k-means clusters of the features."""

    name = "nmi"
    needs = ("classification",)
    formula = "I(Y; K) / ((H(Y) + H(K)) / 2), K from k-means with C clusters"

    def measure(self, s: Subject) -> dict[str, Any]:
        answers = self.drawn(s)
        return {"nmi": nmi(answers.values, answers.y, s.data.classes, self.seed(s), self.normalise), **self.about(s, answers)}


@register
@dataclass(frozen=True)
class Silhouette(_Clustered):
    """Silhouette of the features grouped by their labels, or by k-means."""

    name = "silhouette"
    needs = ("classification",)
    formula = "mean of (b − a) / max(a, b); a: mean distance within the own group, b: to the nearest other group"
    assignment: str = option("labels", "what groups are", choices=("labels", "k-means"))

    def measure(self, s: Subject) -> dict[str, Any]:
        answers = self.drawn(s)
        value = silhouette(answers.values, answers.y, s.data.classes, self.assignment, self.seed(s), self.normalise)
        return {"silhouette": value, **self.about(s, answers)}
