"""VHL: virtual images that all clients have, as a common ground for their features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import rng
from ..core.client import ClientView
from ..core.method import Method
from ..core.part import Part, Spec
from ..core.step_view import StepView
from ..core.task import as_probabilities
from ..options import option
from ..tree import Tree
from . import _virtual_images


@dataclass(frozen=True)
class Vhl(Part):
    """Every step also sees a batch of virtual images, which have classes of their own: C more outputs, attached beside the head.

    Loss: cross-entropy of real and α times that of virtual images over all 2C outputs, and, in the first epochs of a round,
    w_c·SupCon(real and fixed virtual features) + w_v·SupCon(virtual features). Virtual class j counts as class j there, so that a
    client's features of a class gather around features that are the same on every client. Predictions look at the C outputs alone.
    """

    alpha: float = option(1.0, "α, weight of the virtual images' classification", low=0.0, tune=(0.1, 1.0))
    align: float = option(1.0, "w_c, weight of the contrast of real with virtual features", low=0.0, tune=(0.1, 1.0))
    contrast: float = option(0.1, "w_v, weight of the contrast among virtual features", low=0.0)
    tau: float = option(0.07, "temperature of the contrasts", above=0.0)
    images: int = option(2000, "virtual images, the same number of every class", low=2)
    virtual_batch: int = option(128, "virtual images of a step", low=2)
    align_epochs: int = option(5, "epochs of a client's round with contrasts", low=0)

    name, needs_vectors = "vhl", True
    paper = "VHL (Tang et al., ICML 2022)"
    helps = ("label skew", "feature shift")
    departs = ("virtual images come from a small untrained network of our own, not from a StyleGAN, and are neither cropped nor flipped",
               "with BatchNorm virtual images are normalised among themselves and move no running statistics",
               "a step's virtual images are drawn with replacement")
    neutral = {"alpha": 0.0, "align": 0.0, "contrast": 0.0, "images": 12}
    trial = {"images": 12, "virtual_batch": 6}

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"extra outputs"})

    def objection(self, other: Part) -> str | None:
        if Method.has(other, "main_loss"):
            return f"adds outputs to the task's own loss, and {other.name} has another"
        return None

    def require(self, spec: Spec) -> str | None:
        if spec.tokens:
            return "makes virtual samples of real numbers, and the words of a text are whole ones."
        if self.images < spec.classes:
            return f"needs a virtual image of every class: at least {spec.classes}. Set vhl.images."
        return None

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        module.add_module(self.name, nn.Linear(spec.width, spec.classes))
        return module

    def init_shared(self, spec: Spec) -> Tree:
        x, y = _virtual_images.draw(spec, self.name, self.images)
        return {"x": x, "y": y}

    def init_scratch(self, c: ClientView) -> Tree:
        return {"left": c.shared["x"].new_full((), self.align_epochs * c.epoch_steps)}

    def track(self, v: StepView) -> Tree:
        return {"left": v.scratch["left"] - 1}

    @property
    def _acts(self) -> bool:
        return bool(self.alpha or self.align or self.contrast)

    def _virtual(self, v: StepView) -> tuple[Tensor, Tensor]:
        """This step's virtual images and their classes."""
        drawn = v.once("drawn", lambda: rng.integers(v.key("virtual"), self.images, (self.virtual_batch,)))
        return v.once("x", lambda: v.shared["x"][drawn]), v.shared["y"][drawn]

    def beside(self, v: StepView) -> Tensor | None:
        return self._virtual(v)[0] if self._acts else None

    def loss(self, v: StepView) -> Any:
        if not self._acts:
            return 0.0
        (x, y), classes = self._virtual(v), v.spec.classes
        seen = v.forward(v.model, x, train=True, label="virtual")
        real, virtual = v.features, seen.before[v.spec.features]
        extra = v.apply(self.name, torch.cat([real, virtual]))
        # With more outputs than the task's loss knows, −log p is larger by log(1 + Σ exp extra / Σ exp logits).
        total = F.softplus(extra[: len(real)].logsumexp(1) - v.trace.logits.logsumexp(1)).mean()
        total = total + self.alpha * F.cross_entropy(torch.cat([seen.logits, extra[len(real):]], 1), y + classes)
        if self.align or self.contrast:
            own, theirs = as_probabilities(v.batch.target, classes), as_probabilities(y, classes)
            apart = self.align * _contrast(torch.cat([real, virtual.detach()]), torch.cat([own, theirs]), self.tau)
            apart = apart + self.contrast * _contrast(virtual, theirs, self.tau)
            total = total + torch.where(v.scratch["left"] >= 0, apart, 0.0)
        return total


def _contrast(z: Tensor, labels: Tensor, tau: float) -> Tensor:
    """SupCon: −log of the share that others of its class have in what a sample is similar to; 0 for one that is alone in its class.

    Labels are probabilities, and two samples are of one class by the chance that their labels agree.
    """
    z = F.normalize(z)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similar = z @ z.T / tau
    share = similar - similar.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    alike = (labels @ labels.T).masked_fill(itself, 0.0)
    many = alike.sum(1)
    return -((alike * share).sum(1) / torch.where(many > 0, many, 1.0)).mean()
