"""Manifold Mixup: mixup at a layer drawn anew in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rng
from ..core.layout import Layout
from ..core.part import Batch, Part, Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..errors import ConfigError
from ..options import option
from ..tree import Tree
from . import _mixing


@dataclass(frozen=True)
class ManifoldMixup(Part):
    """Mix each batch with a permutation of itself at one layer: λh + (1 − λ)h' and λy + (1 − λ)y', λ ~ Beta(α, α) once per step.

    The layer is drawn in every step, all with the same chance: the input, or what comes out of a stage. Nothing happens in evaluation.
    """

    alpha: float = option(2.0, "of the Beta distribution; 0 mixes nothing", low=0.0, tune=(0.2, 1.0, 2.0))
    layers: tuple[int, ...] = option((), "where: 0 is the input, 1 the first stage; empty for the input and the first two", low=0)

    name, rank = "manifold_mixup", 20                     # after mixup, and before ffa, whose statistics see what was mixed
    paper = "Manifold Mixup (Verma et al., ICML 2019); in FedFA inside one client's batch"
    helps = ("label skew", "feature shift")
    departs = ("on segmentation masks are mixed, not the two losses; they differ in the Dice term only",
               "at the input inputs and labels are mixed; the reference ResNet mixes the labels alone there")
    neutral = {"alpha": 0.0}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"soft labels", _mixing.PAIRED})

    def _layers(self, layout: Layout) -> tuple[str, ...]:
        """Points; the input is the empty one."""
        wrong = [n for n in self.layers if n > len(layout.stages)]
        if wrong or not layout.stages:
            have = f"stages 1 to {len(layout.stages)}" if layout.stages else "no convolution stages; mixup mixes its input"
            raise ConfigError(f"The 'layers' option of {self.name} asks for {list(self.layers) or 'the first two'}, "
                              f"but the model has {have}.")
        places = ("", *layout.stages)
        return tuple(places[n] for n in dict.fromkeys(self.layers)) if self.layers else places[:3]

    def points(self, layout: Layout) -> tuple[str, ...]:
        return tuple(q for q in self._layers(layout) if q)

    def require(self, spec: Spec) -> str | None:
        if spec.tokens and self.alpha and "" in self._layers(spec.layout):
            return "mixes inputs, and whole numbers, as the words of a text, cannot be mixed. Leave 0 out of manifold_mixup.layers."
        return None

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        """weight: λ where a layer is the step's own, 1 elsewhere."""
        steps, layers = len(sizes), len(self._layers(spec.layout))
        here = rng.integers(rng.key(key, "layer"), layers, (steps, 1)) == torch.arange(layers)
        return {"weight": torch.where(here, _mixing.weights(key, self.alpha, steps, 1), 1.0), "order": _mixing.partners(key, spec, sizes)}

    def _mixed(self, v: StepView, t: Tensor, point: str) -> Tensor:
        plan, layers = v.once("plan", lambda: v.plan), self._layers(v.spec.layout)
        if not plan or point not in layers:
            return t
        return _mixing.mixed(t, plan["weight"][layers.index(point)], plan["order"][: len(t)])

    def batch(self, v: StepView) -> Batch:
        """The input's turn comes with its labels: where no tap acts, as in Ditto's second model, they still belong together."""
        if "" not in self._layers(v.spec.layout):
            return v.batch
        target = as_probabilities(v.batch.target, v.spec.classes)
        return v.batch._replace(x=self._mixed(v, v.batch.x, ""), target=self._mixed(v, target, ""))

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        return self._mixed(v, x, point) if v.train else x

    def relabel(self, v: StepView) -> Tensor:
        target = as_probabilities(v.batch.target, v.spec.classes)
        for point in self.points(v.spec.layout):
            target = self._mixed(v, target, point)
        return target
