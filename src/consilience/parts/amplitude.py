"""HarmoFL's first half: the low frequencies of every image get the amplitude that they have on average over clients."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from ..core.client import ClientView
from ..core.layout import Layout
from ..core.part import Part, Spec
from ..core.server import ServerView
from ..core.step_view import StepView
from ..options import option
from ..tree import Tree

EPS = 1e-12


@dataclass(frozen=True)
class Amplitude(Part):
    """The first layer of the model, in training and evaluation: an image keeps its phases, and its amplitudes but for low frequencies.

    Frequencies of at most b = ⌊L·min(H, W)⌋ in both directions take the amplitude A, channel by channel. Before round one every client
    uploads the mean of these amplitudes over its training samples; A is the mean over clients and stays for the whole run.
    """

    low: float = option(0.0, "L, which amplitudes are replaced: frequencies up to ⌊L·min(H, W)⌋; 0: the mean brightness alone", low=0.0,
                        high=1.0, tune=(0.0, 0.01, 0.1))

    name, rank, in_every_pass = "amplitude", 25, True
    paper = "HarmoFL (Jiang et al., AAAI 2022), amplitude normalisation"
    helps = ("feature shift",)
    departs = ("a client's amplitude is the mean over its training samples; in the release, whose momentum is cut to 0, of its first batch",
               "low=0, the mean brightness alone, is the release's value; low=0.5 is the whole spectrum of a square image")
    not_neutral = "at low=0 the mean brightness is still replaced"
    reduce = {"amplitude": "mean"}
    prefers = {"weights": "uniform"}

    @property
    def raw_averages(self) -> str:
        return ("the mean amplitudes of the lowest frequencies of a client's training inputs, sent before the first round; "
                "all clients get their mean over clients")

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.entry,)

    def require(self, spec: Spec) -> str | None:
        return None if len(spec.sample) == 3 else f"needs images, channels × height × width; samples have the shape {spec.sample}."

    def _waves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """e^(−2πi·kj/n) for the low frequencies k of height and width. Two products with them are that block of the transform."""
        height, width = x.shape[-2:]
        most = int(self.low * min(height, width))

        def waves(n: int) -> Tensor:
            k = torch.arange(max(-most, -(n // 2)), min(most, (n - 1) // 2) + 1, device=x.device)
            turns = (k[:, None] * torch.arange(n, device=x.device) % n).to(x.dtype) / n
            return torch.polar(torch.ones_like(turns), -2 * pi * turns)
        return waves(height), waves(width)

    def init_shared(self, spec: Spec) -> Tree:
        rows, columns = self._waves(torch.zeros(spec.sample))
        return {"amplitude": torch.zeros(spec.sample[0], len(rows), len(columns))}

    def prepare(self, c: ClientView) -> Tree:
        total = torch.zeros_like(c.shared["amplitude"])
        for x, _ in c.batches():
            total = total + _spectrum(x, *self._waves(x)).abs().sum(0)
        return {"amplitude": total / c.size}

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        return {"amplitude": s.reduced["amplitude"]}, {}

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        if point != v.spec.layout.entry:
            return x
        rows, columns = self._waves(x)
        f, wanted = _spectrum(x, rows, columns), v.shared["amplitude"]
        own = f.abs()
        there = own > EPS                                          # a coefficient of 0 has the phase 0
        phase = torch.where(there, f / torch.where(there, own, 1.0), 1.0)
        change = torch.where(wanted > 0, wanted - own, 0.0) * phase          # before the first round nobody knows what is wanted
        return x + (rows.mH @ change @ columns.conj()).real


def _spectrum(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The frequencies of images that the waves are of, as means over the pixels rather than sums."""
    return rows @ x.to(rows.dtype) @ columns.T / (x.shape[-2] * x.shape[-1])
