"""What happens to a batch on its way into the model: augmentation and normalisation, on the device, from a key.

A transform is a list of steps, written 'crop+flip+normalise' and run in that order; names of papers stand for their
lists. Images stay uint8 as long as pixels are only moved. With a key every sample draws for itself; with None only the
steps that draw nothing run, as in evaluation. No step looks at a value on the host.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import options, rng
from ..errors import ConfigError, unknown
from ..kernels import batch
from ..options import option
from . import geometry
from .dataset import Dataset
from .federated import as_float
from .shifts import split_plus

WORD = "transform"               # of the keys that steps draw with, made once by a training step and once more here


@dataclass(frozen=True)
class Step(abc.ABC):
    """One step. Steps that move pixels move the masks of a segmentation task as well."""

    name = ""
    summary = ""
    draws = 0                     # random numbers per sample; a step that draws is left out in evaluation
    moves_pixels = False

    def __post_init__(self) -> None:
        options.check(self, f"transform {self.name!r}")

    @property
    def text(self) -> str:
        return options.format_call(self.name, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def fitted(self, dataset: Dataset) -> Step:
        """The step for this data set, or an error when it cannot serve it."""
        if dataset.x.dim() != 4:
            raise ConfigError(f"Transform {self.name!r} needs images, but samples of {dataset.name!r} have the shape "
                              f"{tuple(dataset.x.shape[1:])}. Use 'none'.")
        return self

    @abc.abstractmethod
    def run(self, x: Tensor, u: Tensor) -> Tensor:
        """The batch (samples, channels, height, width) changed; u holds `draws` numbers in (0, 1) per sample."""


@dataclass(frozen=True)
class Nothing(Step):
    """uint8 to [0, 1] and nothing else."""

    name = "none"
    summary = "uint8 to [0, 1]; text and signals as they are"

    def fitted(self, dataset: Dataset) -> Step:
        return self

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Raw(Step):
    """Numbers 0 … 255 as they are, without the division (FedFA's prostate images)."""

    name = "raw"
    summary = "0 … 255 as real numbers, not divided"

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        return x.float()


@dataclass(frozen=True)
class Normalise(Step):
    """(x − mean) / std per channel, of values in [0, 1]. Without numbers: those of the data set."""

    name = "normalise"
    summary = "subtract the mean, divide by the standard deviation, per channel"

    mean: tuple[float, ...] = option((), "per channel; the data set's when left out")
    std: tuple[float, ...] = option((), "per channel; the data set's when left out")

    def fitted(self, dataset: Dataset) -> Step:
        mean, std = self.mean or dataset.mean, self.std or dataset.std
        if not mean or not std:
            raise ConfigError(f"Transform 'normalise' has no mean and standard deviation for {dataset.name!r}. "
                              f"Write normalise(mean=(…), std=(…)), or use 'none'.")
        channels = dataset.x.shape[1] if dataset.x.dim() > 1 else 1
        for what, values in (("means", mean), ("deviations", std)):
            if len(values) not in (1, channels):
                raise ConfigError(f"Transform 'normalise' has {len(values)} {what} for {channels} channels of {dataset.name!r}.")
        if not dataset.x.is_floating_point() and dataset.x.dtype != torch.uint8:
            raise ConfigError(f"Transform 'normalise' needs images or real numbers, but {dataset.name!r} holds {dataset.x.dtype}. "
                              f"Use 'none'.")
        if min(std) <= 0:
            raise ConfigError(f"Transform 'normalise' needs positive deviations. Got {std} instead.")
        return Normalise(mean, std)

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        x, _ = as_float(x, x, None)
        return (x - _per_channel(self.mean, x)) / _per_channel(self.std, x)


@dataclass(frozen=True)
class Crop(Step):
    """Pad, then cut a window of the old size at a random place."""

    name = "crop"
    summary = "random crop of the padded image"
    draws = 2
    moves_pixels = True

    pad: int = option(4, "pixels on each side", low=1)
    mode: str = option("zero", "what the padding holds", choices=("zero", "reflect"))

    def fitted(self, dataset: Dataset) -> Step:
        super().fitted(dataset)
        if self.mode == "reflect" and self.pad >= min(dataset.x.shape[2:]):
            raise ConfigError(f"Transform 'crop' cannot mirror {self.pad} pixels of images of {min(dataset.x.shape[2:])}. "
                              f"Set pad to at most {min(dataset.x.shape[2:]) - 1}.")
        return self

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        top, left = _whole(u, 2 * self.pad + 1) - self.pad
        return geometry.shift_window(x, top, left, reflect=self.mode == "reflect")


@dataclass(frozen=True)
class Flip(Step):
    """Mirror left and right; axes='any' draws left–right, up–down or both."""

    name = "flip"
    summary = "random mirror image"
    draws = 2
    moves_pixels = True

    p: float = option(0.5, "probability", low=0, high=1)
    axes: str = option("horizontal", "along which axis", choices=("horizontal", "any"))

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        chosen = u[0] < self.p
        if self.axes == "horizontal":
            return geometry.flip(x, chosen, -1)
        axis = _whole(u[1], 3)                                              # 0 left–right, 1 up–down, 2 both
        return geometry.flip(geometry.flip(x, chosen & (axis != 1), -1), chosen & (axis != 0), -2)


@dataclass(frozen=True)
class Rotate(Step):
    """Rotate by a random angle of at most `degrees` to either side; nearest pixel, corners 0."""

    name = "rotation"
    summary = "random rotation"
    draws = 1
    moves_pixels = True

    degrees: float = option(30.0, "largest angle", low=0, high=180)

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        return geometry.rotate(x, (2 * u[0] - 1) * self.degrees)


@dataclass(frozen=True)
class QuarterTurn(Step):
    """Turn by a random multiple of 90°."""

    name = "rot90"
    summary = "random quarter turns"
    draws = 1
    moves_pixels = True

    def fitted(self, dataset: Dataset) -> Step:
        super().fitted(dataset)
        if dataset.x.shape[2] != dataset.x.shape[3]:
            raise ConfigError(f"Transform 'rot90' needs square images. Those of {dataset.name!r} are "
                              f"{dataset.x.shape[2]} × {dataset.x.shape[3]}.")
        return self

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        return geometry.quarter_turns(x, _whole(u[0], 4))


@dataclass(frozen=True)
class Cutout(Step):
    """Set a square around a random pixel to 0; it may reach over the edge. Written after normalise, 0 is the mean."""

    name = "cutout"
    summary = "a random square set to 0"
    draws = 2

    size: int = option(16, "side of the square", low=1)

    def run(self, x: Tensor, u: Tensor) -> Tensor:
        inside = []
        for drawn, length in zip(u, x.shape[2:]):
            first = _whole(drawn, length)[:, None] - self.size // 2
            at = torch.arange(length, device=x.device)
            inside.append((at >= first) & (at < first + self.size))
        return torch.where(inside[0][:, None, :, None] & inside[1][:, None, None, :], 0, x)


@dataclass(frozen=True)
class Pipeline:
    """A transform: (x, y, key) → (x, y).

    All numbers of a batch are drawn at once, which on a device takes a fraction of the time that a draw per step takes;
    each step has its own of them.
    """

    steps: tuple[Step, ...]
    with_masks: bool = False

    @property
    def text(self) -> str:
        return "+".join(s.text for s in self.steps)

    @property
    def random(self) -> bool:
        """Whether it draws; a step makes no key for one that does not."""
        return any(s.draws for s in self.steps)

    @cached_property
    def usual(self) -> tuple[Crop | None, Flip | None, Normalise | None] | None:
        """Crop, flip and normalise, where the pipeline is that and nothing else, in that order."""
        steps = [s for s in self.steps if not isinstance(s, Nothing)]
        crop = next((s for s in steps if isinstance(s, Crop)), None)
        flip = next((s for s in steps if isinstance(s, Flip) and s.axes == "horizontal"), None)
        normalise = next((s for s in steps if isinstance(s, Normalise)), None)
        fits = [s for s in (crop, flip, normalise) if s is not None] == steps and not self.with_masks
        return (crop, flip, normalise) if fits else None

    def __call__(self, x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        fused = self.fused(key is not None)
        if fused is not None and batch.usable(x):
            own = rng.key(key, WORD) if key is not None and fused.draws else x        # without a draw nobody looks at it
            return batch.run(x, own, fused), y
        numbers = sum(s.draws for s in self.steps) if key is not None else 0
        u = rng.uniform(rng.key(key, WORD), (numbers, len(x))) if key is not None and numbers else x.new_zeros(0)
        at = 0
        for step in self.steps:
            if step.draws and key is None:
                continue
            own = u[at : at + step.draws]
            at += step.draws
            if step.moves_pixels and self.with_masks:
                y = step.run(y[:, None], own)[:, 0]
            x = step.run(x, own)
        return as_float(x, y, None)

    def fused(self, drawing: bool) -> batch.Usual | None:
        """What the kernel is told, where it knows the steps."""
        if self.usual is None:
            return None
        crop, flip, normalise = self.usual
        if not drawing:
            crop = flip = None
        return batch.Usual(crop.pad if crop else 0, crop is not None and crop.mode == "reflect", flip.p if flip else None,
                                      normalise.mean if normalise else (), normalise.std if normalise else ())

    def gather(self, x: Tensor, y: Tensor, index: Tensor, counter: Tensor, size: int, key: Tensor | None,
               channels_last: bool) -> tuple[Tensor, Tensor] | None:
        """self(x[rows], y[rows], rng.key(rng.fold(key, counter), "transform")) for the first `size` of the rows index[counter], in one
        kernel; without a key as in evaluation. None where there is no kernel for these steps and samples.
        """
        fused = self.fused(key is not None)
        if fused is None or not batch.usable(x, size) or y.dim() != 1 or not y.is_contiguous() or not index.is_contiguous():
            return None
        source = batch.Source(y, index, counter, rng.number(WORD))
        return batch.gather(x, size, x if key is None else key, fused, source, channels_last)


STEPS: dict[str, type[Step]] = {s.name: s for s in (Nothing, Raw, Normalise, Crop, Flip, Rotate, QuarterTurn, Cutout)}

_CIFAR10_FM = "normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))"
_CIFAR10_FEDML = "normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))"
_CIFAR10_MOON = f"normalise(mean={tuple(v / 255 for v in (125.3, 123.0, 113.9))}, std={tuple(v / 255 for v in (63.0, 62.1, 66.7))})"
_CIFAR100 = "normalise(mean=(0.50707516, 0.48654887, 0.44091784), std=(0.26733429, 0.25643846, 0.27615047))"
_IMAGENET = "normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))"

# What each paper does to a batch (METHODS §8.2). Where paper and released code differ, both are here.
NAMED: dict[str, str] = {
    "half": "normalise(mean=(0.5,), std=(0.5,))",
    "dbe": "half",
    "moon_cifar10": f"crop(pad=4, mode=reflect)+flip+{_CIFAR10_MOON}",
    "moon_cifar100": f"crop(pad=4)+flip+rotation(degrees=15)+{_CIFAR100}",
    "fedml": f"crop(pad=4)+flip+{_CIFAR10_FEDML}+cutout(size=16)",
    "fedfm_cifar10": _CIFAR10_FM,
    "fedfm_cifar100": f"crop(pad=4)+flip+rotation(degrees=15)+{_CIFAR100}",
    "fedbr": "none",
    "fedbr_cifar100": f"crop(pad=4)+flip+{_CIFAR100}",
    "fedbr_pacs": _IMAGENET,
    "fedfa_office": "flip+rotation(degrees=30)",
    "fedfa_office_released": "none",
    "fedfa_domainnet": "flip+rotation(degrees=30)",
    "fedfa_prostate": "raw",
    "fedfa_prostate_released": "rot90+flip(p=0.75, axes=any)+raw",
    "fedfa_cifar10": f"crop(pad=4)+flip+{_CIFAR10_FM}",
}


STANDARDISE = "standardise"               # normalise, by the numbers of the training samples: known once these are


def mean_and_std(x: Tensor, rows: Tensor, piece: int = 4096) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per channel, or per column, over these samples as real numbers. A channel that never changes is divided by 1."""
    total = square = torch.zeros(x.shape[1], dtype=torch.float64)
    count = 0
    for own in rows.split(piece):
        part = as_float(x[own], own, None)[0].double().movedim(1, 0).flatten(1)
        total, square, count = total + part.sum(1), square + part.square().sum(1), count + part.shape[1]
    mean = total / max(count, 1)
    std = (square / max(count, 1) - mean.square()).clamp(min=0).sqrt()
    flat = std <= 1e-6 * mean.abs()                      # rounding, not spread
    short = lambda values: tuple(float(f"{v:.7g}") for v in values.tolist())         # written out in records and in a federation's app
    return short(mean), short(torch.where(flat, 1.0, std))


def make(text: str | None, dataset: Dataset, training: Callable[[], tuple[tuple[float, ...], tuple[float, ...]]] | None = None) -> Pipeline:
    """'crop+flip+normalise', or a paper's name, as a transform for the data set. None: normalise where it has a mean, else none.

    `training` gives mean and deviation of the training samples, for 'standardise'.
    """
    if text is None:
        text = "normalise" if dataset.mean else "none"
    steps: list[Step] = []
    for part in split_plus(text):
        name, values = options.parse_call(part, "A transform")
        if name in NAMED:
            if values:
                raise ConfigError(f"Transform {name!r} stands for {NAMED[name]!r} and has no settings. "
                                  f"Write that out to change it.")
            steps += make(NAMED[name], dataset).steps
        elif name == STANDARDISE:
            if values:
                raise ConfigError(f"Transform 'standardise' has no settings: it takes its numbers from the training samples. Got {part!r} "
                                  "instead. With numbers of your own write normalise(mean=(…), std=(…)).")
            if training is None:
                raise ConfigError("Transform 'standardise' takes its numbers from the training samples of a run. Elsewhere write them out, "
                                  "normalise(mean=(…), std=(…)): config.json of a run has them.")
            if dataset.x.dim() < 2 or not (dataset.x.is_floating_point() or dataset.x.dtype == torch.uint8):
                raise ConfigError(f"Transform 'standardise' needs images or real numbers, but {dataset.name!r} holds {dataset.x.dtype}. "
                                  "Use 'none'.")
            steps.append(Normalise(*training()).fitted(dataset))
        elif name in STEPS:
            steps.append(options.build(STEPS[name], values, f"transform {name!r}").fitted(dataset))
        else:
            raise unknown("transform", name, [*STEPS, STANDARDISE, *NAMED])
    return Pipeline(tuple(steps), dataset.task == "segmentation")


def _whole(u: Tensor, below: int) -> Tensor:
    """Numbers in (0, 1) as whole numbers 0 … below − 1. The largest number times `below` may round up to it."""
    return (u * below).long().clamp(max=below - 1)


def _per_channel(values: tuple[float, ...], x: Tensor) -> Tensor | float:
    """The numbers against the channels of x. Filled on the device: a copy from the host cannot be part of a captured step."""
    if len(set(values)) == 1:
        return values[0]
    return torch.stack([torch.full((), v, device=x.device) for v in values]).reshape(-1, *[1] * (x.dim() - 2))
