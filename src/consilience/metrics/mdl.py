"""Minimum description length of labels given representations: how many bits a probe needs to transmit them.

Small sizes of the loss-data curve are cheap to learn from, large ones dear; the sum over the curve says how easily the labels
can be read off the representation (METHODS.md 6.1, after the `reprieve` package).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import rng
from ..errors import DataError

SMALLEST = 10                # smallest size of the loss-data curve


@dataclass(frozen=True)
class Probe:
    """An MLP on the flattened representation, trained by Adam without regularisation; its last state counts."""

    steps: int = 4000
    batch: int = 256
    lr: float = 1e-4
    hidden: int = 512


def curve_sizes(pool: int, points: int = 10) -> list[int]:
    """Sizes spaced evenly in the logarithm from 10 to the pool, rounded up and never above the pool."""
    ratio = math.log(pool / SMALLEST)
    exact = [SMALLEST * math.exp(ratio * i / (points - 1)) if points > 1 else float(pool) for i in range(points)]
    # a size that is whole up to rounding error must not be rounded up to the next
    return sorted({min(pool, math.ceil(size - 1e-9 * size)) for size in exact})


def code_lengths(sizes: Sequence[int], losses: Sequence[float], classes: int) -> dict[str, float]:
    """Nats to transmit the labels of the largest size, two ways.

    right endpoint:  Σ_i (n_i − n_{i−1}) L(n_i), n_0 = 0.
    prequential:     n_1 ln C + Σ_{i>1} (n_i − n_{i−1}) L(n_{i−1}): a block is coded by the probe of the samples before it.
    """
    blocks = [n - m for n, m in zip(sizes, [0, *sizes[:-1]])]
    return {"right_endpoint": sum(b * loss for b, loss in zip(blocks, losses)),
            "prequential": sum(b * loss for b, loss in zip(blocks, [math.log(classes), *losses[:-1]]))}


def mdl(features: Tensor, y: Tensor, classes: int, key: Tensor, *, n: int | None = None, points: int = 10, seeds: int = 5,
        probe: Probe | None = None, tell: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Any]:
    """Description length of y given features (one row per sample), in nats and bits, with the loss-data curve.

    Samples are shuffled by the key and cut to n. The last tenth (rounded up) is validation, the rest the pool. One scalar mean
    and one scalar standard deviation over all entries of the pool standardise everything.
    """
    probe = probe or Probe()
    if n is not None and n > len(y):
        raise DataError(f"mdl: {n} samples were asked for, but there are {len(y)}.")
    order = rng.permutation(rng.key(key, "shuffle"), len(y))[:n].to(y.device)
    x, y = features.flatten(1).float()[order], y[order]
    held = math.ceil(len(y) / 10)
    pool = len(y) - held
    if pool < 2 * SMALLEST:
        raise DataError(f"mdl needs at least {math.ceil(2 * SMALLEST / 0.9)} samples. Got {len(y)} instead.")
    std = x[:pool].double().std(correction=0)
    x = ((x.double() - x[:pool].double().mean()) / (std if std > 0 else 1.0)).float()
    sizes = curve_sizes(pool, points)
    losses = []
    for done, size in enumerate(sizes):
        tell(done, len(sizes))
        rows = torch.stack([rng.permutation(rng.key(key, "subset", seed, size), pool)[:size] for seed in range(seeds)]).to(y.device)
        losses.append(_probe_losses(x, y, rows, slice(pool, None), classes, probe, rng.key(key, "probe", size)))
    tell(len(sizes), len(sizes))
    means = [sum(each) / len(each) for each in losses]
    nats = code_lengths(sizes, means, classes)
    both = {way: {"nats": v, "bits": v / math.log(2), "bits_per_sample": v / math.log(2) / pool} for way, v in nats.items()}
    return {**both, "uniform_code": {"nats": pool * math.log(classes), "bits": pool * math.log2(classes)}, "samples": len(y),
            "coded": pool, "validation": held, "curve": {"sizes": sizes, "loss": means, "loss_per_seed": losses}}


def _probe_losses(x: Tensor, y: Tensor, rows: Tensor, held: slice, classes: int, probe: Probe, key: Tensor) -> list[float]:
    """Validation loss of one probe per row of `rows`, trained side by side.

    A batch is the whole subset where that is no larger than the batch size; else subsets are passed in a new order each epoch,
    an epoch's rest filled up from the next.
    """
    seeds, size = rows.shape
    widths = (x.shape[1], probe.hidden, probe.hidden, classes)
    weights = [w.requires_grad_() for w in _initial(widths, seeds, key, x.device)]
    optimiser = _adam(weights, probe.lr)
    batch = min(probe.batch, size)
    orders = [_Order(rng.key(key, "order", seed), size) for seed in range(seeds)] if size > batch else []
    with torch.enable_grad():
        for _ in range(probe.steps):
            drawn = rows.gather(1, torch.stack([o.next(batch) for o in orders]).to(rows.device)) if orders else rows
            logits = _forward(weights, x[drawn])
            loss = F.cross_entropy(logits.flatten(0, 1), y[drawn].flatten()) * seeds       # Σ over probes of their means
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        out = []
        for seed in range(seeds):
            logits = _forward([w[seed: seed + 1] for w in weights], x[held][None])[0]
            out.append(float(F.cross_entropy(logits.double(), y[held])))
    return out


def _initial(widths: Sequence[int], seeds: int, key: Tensor, device: Any) -> list[Tensor]:
    """Weights and biases uniform in ±1/√fan_in, as torch's Linear draws them."""
    out = []
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        for kind, shape in (("weight", (fan_in, fan_out)), ("bias", (1, fan_out))):
            drawn = [rng.uniform(rng.key(key, kind, layer, seed), shape) for seed in range(seeds)]
            out.append(((2 * torch.stack(drawn) - 1) / math.sqrt(fan_in)).to(device))
    return out


def _adam(weights: list[Tensor], lr: float) -> torch.optim.Adam:
    """Fused where this version of torch can do that on this device; a third of the time of a step on small subsets."""
    try:
        return torch.optim.Adam(weights, lr=lr, fused=True)
    except RuntimeError:
        return torch.optim.Adam(weights, lr=lr)


def _forward(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """(probes, samples, width) → (probes, samples, classes)."""
    for layer in range(0, len(weights), 2):
        x = torch.baddbmm(weights[layer + 1], x, weights[layer])
        if layer < len(weights) - 2:
            x = x.relu()
    return x


class _Order:
    """An endless stream of permutations, cut into batches."""

    def __init__(self, key: Tensor, size: int) -> None:
        self.key, self.size, self.epoch = key, size, 0
        self.left = torch.zeros(0, dtype=torch.int64)

    def next(self, count: int) -> Tensor:
        while len(self.left) < count:
            self.left = torch.cat([self.left, rng.permutation(rng.key(self.key, self.epoch), self.size)])
            self.epoch += 1
        out, self.left = self.left[:count], self.left[count:]
        return out
