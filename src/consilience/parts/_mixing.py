"""What parts share that mix the samples of a batch: partners within it, their weights, and the stages whose maps they change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import rng
from ..core.layout import Layout
from ..core.part import Spec
from ..errors import ConfigError

PAIRED = "partners within a batch"          # the trait of parts whose taps mix a sample with another of its batch


def partners(key: Tensor, spec: Spec, sizes: Tensor) -> Tensor:
    """(steps, batch): a permutation of every batch. A smaller last one is permuted within itself: places beyond it sort to the end."""
    steps, batch = len(sizes), spec.policy.batch
    noise = rng.bits(rng.key(key, "order"), steps * batch).reshape(steps, batch)
    beyond = torch.arange(batch) >= sizes[:, None]
    return torch.where(beyond, torch.iinfo(torch.int64).max, noise).argsort(dim=1, stable=True)


def weights(key: Tensor, alpha: float, *shape: int) -> Tensor:
    """λ ~ Beta(α, α); 1 where α is 0, so that nothing is mixed."""
    return torch.from_numpy(rng.host(key).beta(alpha, alpha, shape)).float() if alpha else torch.ones(shape)


def coins(key: Tensor, p: float, *shape: int) -> Tensor:
    """True with probability p."""
    return rng.uniform(rng.key(key, "coin"), shape) < p


def mixed(t: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """w·t + (1 − w)·t' with the partners' rows t'."""
    return w * t + (1 - w) * t.index_select(0, other)


def chosen(layout: Layout, numbers: Sequence[int], owner: str, unnamed: str = "all", first: int | None = None,
           option: str = "stages") -> tuple[str, ...]:
    """The stages that an option names, counted from 1; the `first` of them, which are `unnamed`, where it names none."""
    wrong = [n for n in numbers if not 1 <= n <= len(layout.stages)]
    if wrong or not layout.stages:
        have = f"stages 1 to {len(layout.stages)}" if layout.stages else "no convolution stages"
        raise ConfigError(f"The {option!r} option of {owner} asks for {list(numbers) or unnamed}, but the model has {have}.")
    return tuple(layout.stages[n - 1] for n in dict.fromkeys(numbers)) if numbers else layout.stages[:first]


def no_spread(spec: Spec, points: Sequence[str], owner: str, option: str = "stages") -> str | None:
    """Why maps have no variance over their positions, or None."""
    for point in points:
        shape = spec.shapes[point]
        if len(shape) != 3 or shape[1] * shape[2] < 2:
            return (f"needs feature maps of at least two positions, but {point!r} has shape {shape}. "
                    f"Choose another place with {owner}.{option}, or larger inputs.")
    return None
