"""What pooling of few channels gains on one thread: layers alone, and whole rounds of methods with MOON's CNN.

    python benchmarks/pooling.py [fedavg lfd] [--turns 15]

By turns in one process, in processor time, as ratios: PyTorch's pooling ÷ ours, which compares slices of the maps
(layers/pooling.py). The numbers of both are the same bit for bit, which is checked. Medians over turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines import Sequential
from consilience.layers import pooling
from consilience.layers.pooling import pool_swiftly
from consilience.models import make
from consilience.parts import parse_stack

MAPS, BATCH, SHAPE = [(128, 6, 28, 28), (64, 6, 28, 28), (10, 6, 28, 28), (128, 8, 24, 24), (32, 64, 32, 32)], 128, (3, 32, 32)
CLIENTS, SAMPLES = 2, 640
NEVER = 10**12                                          # more numbers than any map has


def compared(run: Callable[[bool], object], turns: int) -> tuple[float, float, float]:
    """Seconds with PyTorch's pooling and with ours, and the median of their ratios; `run` is told whether it is ours."""
    times: list[tuple[float, float]] = []
    for turn in range(turns + 3):
        pair = []
        for ours in (False, True):
            start = time.thread_time()
            run(ours)
            pair.append(time.thread_time() - start)
        if turn >= 3:
            times.append((pair[0], pair[1]))
    theirs, own = zip(*times)
    return statistics.median(theirs), statistics.median(own), statistics.median(a / b for a, b in times)


def layer(shape: tuple[int, ...], backward: bool) -> Callable[[bool], object]:
    plain, swift = nn.MaxPool2d(2), nn.MaxPool2d(2)
    pool_swiftly(swift)
    x = rng.normal(rng.key(0, "maps"), shape).relu().requires_grad_(backward)
    g = torch.ones_like(plain(x))
    ways = {ours: (lambda pool: torch.autograd.grad(pool(x), x, g)[0] if backward else pool(x), swift if ours else plain)
            for ours in (False, True)}
    assert torch.equal(ways[True][0](swift), ways[False][0](plain))
    return lambda ours: ways[ours][0](ways[ours][1])


def round_of(method: str) -> Callable[[bool], object]:
    """A round of five steps at each of two clients, and the models after it."""
    n = CLIENTS * SAMPLES
    population = Population(rng.normal(rng.key(0, "x"), (n, *SHAPE)), rng.integers(rng.key(0, "y"), 10, (n,)),
                            tuple(torch.arange(n).split(SAMPLES)), 10, as_float)

    def federation() -> Federation:
        built = make("moon_cnn", sample=SHAPE, classes=10, key=rng.key(0, "model"))
        return Federation(built.module, built.layout, parse_stack(method).method(), population, Policy(lr=0.01, batch=BATCH), Sequential)
    both = {ours: federation() for ours in (False, True)}

    def run(ours: bool) -> object:
        with patch.object(pooling, "FEWEST_NUMBERS", pooling.FEWEST_NUMBERS if ours else NEVER):
            both[ours].round()
        if ours:                                        # the last of a turn: as many rounds on both sides
            a, b = (fed.model["params"] for fed in both.values())
            assert all(torch.equal(a[k], b[k]) for k in a)
        return None
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["fedavg", "lfd"])
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':34s}{'PyTorch':>10s}{'ours':>10s}{'ratio':>8s}")
    rows = [("×".join(map(str, shape)) + how, layer(shape, backward))
            for shape in MAPS for how, backward in ((", no gradient", False), (", both ways", True))]
    for name, run in [*rows, *((f"a round of {m}", round_of(m)) for m in args.methods)]:
        theirs, ours, ratio = compared(run, args.turns)
        print(f"{name:34s}{theirs * 1e3:7.2f} ms{ours * 1e3:7.2f} ms{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
