"""Shifts of the inputs that make clients differ though their labels may not: rotation, noise, augmentation frozen at load.

A shift is applied once, when the data is loaded, to all rows of a client (training, validation and test alike). What a
sample receives depends on the key, its client and its row only, so the same call on the masks of a segmentation task
moves them with their images.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import options, rng
from ..errors import ConfigError, unknown
from ..options import option
from . import geometry
from .splits.base import log_dirichlet

_CHUNK = 4096                     # rows moved at a time, so that index tensors stay small


@dataclass(frozen=True)
class Shift(abc.ABC):
    """A change of the samples that depends on who owns them."""

    name = ""
    summary = ""
    needs_images = True
    moves_pixels = False          # apply it to masks as well

    def __post_init__(self) -> None:
        options.check(self, f"shift {self.name!r}")

    @property
    def text(self) -> str:
        return options.format_call(self.name, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def apply(self, x: Tensor, rows: list[Tensor], key: Tensor) -> Tensor:
        """A new tensor with the rows of every client shifted; rows that belong to no client are as they were."""
        if self.needs_images and x.dim() != 4:
            raise ConfigError(f"Shift {self.name!r} needs images (samples, channels, height, width). "
                              f"Got samples of shape {tuple(x.shape[1:])} instead.")
        out = x.clone()
        for client, owned in enumerate(rows):
            for chunk in owned.split(_CHUNK):
                if len(chunk):
                    out[chunk] = self._shift(x[chunk], chunk, client, len(rows), rng.key(key, "shift", self.name))
        return out

    @abc.abstractmethod
    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        """Samples `x`, which are the given rows of one client."""


@dataclass(frozen=True)
class NoShift(Shift):
    """Samples as they are."""

    name = "none"
    summary = "samples as they are"
    needs_images = False

    def apply(self, x: Tensor, rows: list[Tensor], key: Tensor) -> Tensor:
        return x

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Rotation(Shift):
    """Client i is rotated by start + step · i degrees counter-clockwise; nearest pixel, corners 0 (FedBR's RotatedMNIST)."""

    name = "rotation"
    summary = "a fixed angle per client"
    moves_pixels = True

    step: float = option(15.0, "degrees from one client to the next")
    start: float = option(0.0, "degrees of the first client")

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        return geometry.rotate(x, torch.tensor(self.start + self.step * client))


@dataclass(frozen=True)
class DrawnRotation(Shift):
    """Each client draws how often it uses each of `angles` angles; each image draws its angle from that (FedBR's CIFAR-10).

    FedBR's paper says Dirichlet(1) per angle; its code comes out at 0.1 per angle.
    """

    name = "drawn_rotation"
    summary = "an angle per image, from a distribution per client"
    moves_pixels = True

    concentration: float = option(1.0, "Dirichlet concentration per angle; small: few angles per client", above=0)
    angles: int = option(10, "number of angles: 0, step, 2 · step, …", low=1)
    step: float = option(15.0, "degrees between angles")

    def degrees(self, rows: Tensor, client: int, key: Tensor) -> Tensor:
        """The angle of each row. The draw of a row does not depend on which other rows are asked for."""
        draw = log_dirichlet(np.full(self.angles, self.concentration), rng.host(rng.key(key, "client", client)))
        edges = torch.from_numpy(np.exp(draw).cumsum()[:-1])
        return torch.searchsorted(edges, _per_row(rng.key(key, "image"), rows).double(), right=True) * self.step

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        return geometry.rotate(x, self.degrees(rows, client, key))


@dataclass(frozen=True)
class Noise(Shift):
    """Gaussian noise on values in [0, 1]; uint8 images are rounded and clipped."""

    name = "noise"
    summary = "Gaussian noise, stronger from client to client or alike"
    needs_images = False

    std: float = option(0.1, "standard deviation, of values in [0, 1]", low=0)
    level: str = option("growing", "growing: client i of N has std · (i + 1) / N; fixed: std",
                        choices=("growing", "fixed"))

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.dtype == torch.uint8):
            raise ConfigError(f"Shift 'noise' needs images or real numbers. Got {x.dtype} instead.")
        std = self.std * (client + 1) / clients if self.level == "growing" else self.std
        # A host generator per row: five times faster than hashing each of 150 million pixels of CIFAR-10.
        draws = [rng.host(k).standard_normal(tuple(x.shape[1:]), dtype=np.float32) for k in rng.fold(key, rows)]
        noise = std * torch.from_numpy(np.stack(draws))
        if x.dtype == torch.uint8:
            return (x + 255 * noise).round().clamp(0, 255).to(torch.uint8)
        return x + noise.to(x.dtype)


@dataclass(frozen=True)
class FrozenCropFlip(Shift):
    """One random crop and flip per image, drawn once and kept (what FedBR's code does to CIFAR-100)."""

    name = "frozen_crop_flip"
    summary = "crop and flip drawn once per image, then kept"
    moves_pixels = True

    pad: int = option(4, "pixels of zero padding", low=1)

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        top, left = ((_per_row(rng.key(key, side), rows) * (2 * self.pad + 1)).long() - self.pad for side in ("top", "left"))
        return geometry.flip(geometry.shift_window(x, top, left, reflect=False), _per_row(rng.key(key, "flip"), rows) < 0.5, -1)


@dataclass(frozen=True)
class _Several(Shift):
    """Shifts one after the other."""

    shifts: tuple = ()

    @property
    def text(self) -> str:
        return "+".join(s.text for s in self.shifts)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_images", any(s.needs_images for s in self.shifts))
        object.__setattr__(self, "moves_pixels", any(s.moves_pixels for s in self.shifts))

    def apply(self, x: Tensor, rows: list[Tensor], key: Tensor) -> Tensor:
        for place, shift in enumerate(self.shifts):
            x = shift.apply(x, rows, rng.key(key, "shift", place))
        return x

    def _shift(self, x: Tensor, rows: Tensor, client: int, clients: int, key: Tensor) -> Tensor:
        raise NotImplementedError("shifts in a row are applied one by one")


SHIFTS: dict[str, type[Shift]] = {s.name: s for s in (NoShift, Rotation, DrawnRotation, Noise, FrozenCropFlip)}


def make(text: str | Shift) -> Shift:
    """'rotation(step=15)' as a shift; several are joined by '+'."""
    if isinstance(text, Shift):
        return text
    made = []
    for part in split_plus(text):
        name, values = options.parse_call(part, "A shift")
        if name not in SHIFTS:
            raise unknown("shift", name, SHIFTS)
        made.append(options.build(SHIFTS[name], values, f"shift {name!r}"))
    return made[0] if len(made) == 1 else _Several(tuple(made))


def split_plus(text: str) -> list[str]:
    """'a+b(x=1)' → ['a', 'b(x=1)']: a plus sign inside brackets belongs to the value."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([") - (c in ")]")
        if c == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _per_row(key: Tensor, rows: Tensor) -> Tensor:
    """One number in (0, 1) for each row; it depends on the key and the row's number only."""
    return torch.vmap(lambda k: rng.uniform(k, ()))(rng.fold(key, rows))
