"""What every architecture here is: declared settings, a chain of named stages, and a layout of their names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import rng
from ..core.layout import Layout
from ..errors import ConfigError
from ..options import option


class Need(NamedTuple):
    """What the data ask of a model: shape of one sample, classes, and the vocabulary where samples are tokens."""

    sample: tuple[int, ...]
    classes: int
    vocabulary: int | None = None


class Built(NamedTuple):
    module: nn.Module
    layout: Layout


class Stages(nn.Sequential):
    """A chain of named modules, each run once, the head last.

    `published_names` maps the beginnings of names in published weight files to the names used here.
    """

    def __init__(self, stages: Mapping[str, nn.Module], published_names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, stage)
        self.published_names = dict(published_names or {})


def probe_batch(need: Need, batch: int = 2) -> Tensor:
    """A batch with the shape and kind of the data: normal numbers, or the padding token."""
    if need.vocabulary:
        return torch.zeros(batch, *need.sample, dtype=torch.int64)
    return rng.normal(rng.key(0, "probe"), (batch, *need.sample))


class Architecture:
    """The settings of one architecture. A subclass is a frozen dataclass in a file of its own, named as its `name`.

    Most are a chain: `body` gives the stages before the head, the sizes are found by running it once. An
    architecture that is no chain overrides `build`.
    """

    name = ""                               # as users write it; empty for what is not offered
    example: tuple[tuple[int, ...], int] = ((3, 32, 32), 10)    # a sample and a number of classes, for tables and tests
    vocabulary: int | None = None           # of the example, where samples are tokens
    stages: tuple[str, ...] = ()            # convolution stages, in the order of the forward pass
    header: tuple[str, ...] = ()
    published_names: Mapping[str, str] = {}

    def body(self, need: Need) -> dict[str, nn.Module]:
        """The stages before the head, by name."""
        raise NotImplementedError

    def head(self, width: int, classes: int) -> nn.Module:
        return nn.Linear(width, classes)

    def extra(self, width: int) -> dict[str, nn.Module]:
        """Modules between the body and the head."""
        return {}

    def initialise(self, module: nn.Module) -> None:
        """Values that differ from PyTorch's own initial values."""

    def build(self, need: Need) -> Built:
        stages = self.body(need)
        stages.update(self.extra(shape_after(stages, need, self.name)[-1]))
        shapes = shapes_along(stages, need, self.name)
        features = list(shapes.values())[-1]
        if len(features) != 1:
            raise ConfigError(f"Model {self.name!r} gives its head maps of shape {features} for samples of shape "
                              f"{need.sample}; it needs one vector per sample.")
        module = Stages({**stages, "head": self.head(features[0], need.classes)}, self.published_names)
        self.initialise(module)
        extractor = tuple(n for n in stages if n not in self.header)
        # A map of one position has no statistics of its own, so it is no place for a method that works on maps.
        maps = tuple(n for n in self.stages if math.prod(shapes[n][1:]) > 1)
        return Built(module, Layout(stages=maps, extractor=extractor, header=self.header))


@dataclass(frozen=True)
class Projected(Architecture):
    """An architecture whose extractor can end in FedBR's projection (its Fig. 6a): d → 2p → 2p → p, ReLU between."""

    project: int = option(0, "width p of a three-layer projection at the end of the extractor; 0: none", low=0)

    def extra(self, width: int) -> dict[str, nn.Module]:
        p = self.project
        if not p:
            return {}
        return {"project": nn.Sequential(nn.Linear(width, 2 * p), nn.ReLU(), nn.Linear(2 * p, 2 * p), nn.ReLU(),
                                         nn.Linear(2 * p, p))}


def shapes_along(stages: Mapping[str, nn.Module], need: Need, owner: str) -> dict[str, tuple[int, ...]]:
    """The shape, per sample, that each stage gives. Run in eval mode, so that nothing is drawn or recorded."""
    x, shapes = probe_batch(need), {}
    for name, stage in stages.items():
        training = stage.training
        try:
            with torch.no_grad():
                x = stage.eval()(x)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(f"Samples of shape {need.sample} do not fit model {owner!r}: at {name!r} "
                              f"{str(error).splitlines()[0]}") from error
        finally:
            stage.train(training)
        shapes[name] = tuple(x.shape[1:])
    return shapes


def shape_after(stages: Mapping[str, nn.Module], need: Need, owner: str) -> tuple[int, ...]:
    """The shape, per sample, at the end of the stages."""
    return list(shapes_along(stages, need, owner).values())[-1]


def flat_width(stages: Mapping[str, nn.Module], need: Need, owner: str) -> int:
    """Numbers per sample at the end of the stages."""
    return math.prod(shape_after(stages, need, owner))
