"""What frozen models cost: methods that hold every batch against the received model or the client's last one, in rounds of FedAvg.

    python benchmarks/teachers.py [moon fedntd lfd] [--epochs 1 2 5 10] [--turns 5] [--model fedavg_cnn] [--device cuda]

Three rounds are timed by turns in one process, on the same samples: FedAvg's, the method's with its frozen models asked in every step, and
the method's as it is, which asks them once a round where that is worth it (core/recall.py). Medians over turns, as ratios to FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines import Sequential
from consilience.engines.slots import Slots
from consilience.models import make
from consilience.parts import parse_stack

CLIENTS, SAMPLES, BATCH, SHAPE = 4, 400, 50, (1, 28, 28)


def population() -> Population:
    n = CLIENTS * SAMPLES
    return Population(rng.normal(rng.key(0, "x"), (n, *SHAPE)), rng.integers(rng.key(0, "y"), 10, (n,)),
                      tuple(torch.arange(n).split(SAMPLES)), 10, as_float)


def rounds_of(method: str, epochs: int, model: str, device: str, recall: bool) -> Callable[[], float]:
    """A function that makes a round and says how long it took."""
    built = make(model, sample=SHAPE, classes=10, key=rng.key(0, "model"))
    fed = Federation(built.module, built.layout, parse_stack(method).method(), population(), Policy(lr=0.005, batch=BATCH, epochs=epochs),
                     Slots if device == "cuda" else Sequential, device)
    if not recall:
        fed.recalled = ()
    for _ in range(2):                              # previous models exist from now on, and steps are recorded
        fed.round()

    def timed() -> float:
        start = time.perf_counter()
        fed.round()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start
    return timed


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("methods", nargs="*", default=["moon", "fedntd", "lfd"])
    args.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 5, 10])
    args.add_argument("--turns", type=int, default=5)
    args.add_argument("--model", default="fedavg_cnn")
    args.add_argument("--device", default="cpu")
    given = args.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'method':10} {'epochs':>6} {'asked in every step':>20} {'as it is':>10}")
    for method in given.methods:
        for epochs in given.epochs:
            sides = [rounds_of(name, epochs, given.model, given.device, recall)
                     for name, recall in (("fedavg", False), (method, False), (method, True))]
            turns = [[side() for side in sides] for _ in range(given.turns)]
            stepwise, once = (statistics.median(t[i] / t[0] for t in turns) for i in (1, 2))
            print(f"{method:10} {epochs:6d} {stepwise:20.2f} {once:10.2f}", flush=True)


if __name__ == "__main__":
    main()
