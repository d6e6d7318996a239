"""Minimum description length of labels given representations: how many bits a probe needs to transmit them.

Small sizes of the loss-data curve are cheap to learn from, large ones dear; the sum over the curve says how easily the labels
can be read off the representation (METHODS.md 6.1, after the `reprieve` package).
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from .. import rng
from ..errors import DataError
from .probes import Probe, Task, fit_together, train_probes

SMALLEST = 10                # smallest size of the loss-data curve


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
        probe: Probe | None = None, tell: Callable[[int, int], None] = lambda done, of: None,
        found: MutableMapping[str, float] | None = None, keep: Callable[[], None] = lambda: None,
        together: int | None = None) -> dict[str, Any]:
    """Description length of y given features (one row per sample), in nats and bits, with the loss-data curve.

    Samples are shuffled by the key and cut to n. The last tenth (rounded up) is validation, the rest the pool. One scalar mean
    and one scalar standard deviation over all entries of the pool standardise everything.

    `found` holds losses of probes that were trained before, by size and seed; what is found is added there and `keep` is called, so that
    a measure that is stopped (`tell` may raise) goes on with the next probe. `together`: probes trained at once, by default as the device
    likes it.
    """
    probe, found = probe or Probe(), {} if found is None else found
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
    tasks = [Task(size, seed, rng.permutation(rng.key(key, "subset", seed, size), pool)[:size], rng.key(key, "probe", size))
             for size in sizes for seed in range(seeds)]
    left = [t for t in tasks if t.name not in found]
    done, of = probe.steps * (len(tasks) - len(left)), probe.steps * len(tasks)

    def made(steps: int) -> None:
        nonlocal done
        done += steps
        tell(done, of)
    tell(done, of)
    together = together or fit_together(x.shape[1], classes, probe, x.device)
    for task, loss in train_probes(x, y, left, slice(pool, None), classes, probe, together, made):
        found[task.name] = loss
        keep()
    losses = [[found[t.name] for t in tasks if t.size == size] for size in sizes]
    means = [sum(each) / len(each) for each in losses]
    nats = code_lengths(sizes, means, classes)
    both = {way: {"nats": v, "bits": v / math.log(2), "bits_per_sample": v / math.log(2) / pool} for way, v in nats.items()}
    return {**both, "uniform_code": {"nats": pool * math.log(classes), "bits": pool * math.log2(classes)}, "samples": len(y),
            "coded": pool, "validation": held, "curve": {"sizes": sizes, "loss": means, "loss_per_seed": losses}}


__all__ = ["Probe", "code_lengths", "curve_sizes", "mdl"]
