"""The workers engine against bare single-threaded PyTorch loops, as many of them side by side as there are workers.

    python benchmarks/workers.py             # float32, channels_last, bfloat16 with channels_last; then float32's ratio alone
    python benchmarks/workers.py --quick     # fewer clients and rounds
    python benchmarks/workers.py --workers 8

FedAvg's 4-layer CNN on images of Fashion-MNIST's shape, batch 10, 20 clients of 400 samples. A product round is everything: loading
the clients, their steps, the results back, the average, and the global model scored on 2,000 samples. A bare loop has the
steps of its share of the clients and the same evaluation of its share of the samples, nothing else: no averaging, no exchange.
Both sides are warm, run by turns on the same machine, and do the same number of steps; ratios are medians over the turns, above 1
where the product is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines.hardware import usable_cores
from consilience.engines.workers import Workers
from consilience.metrics.accuracy import score_global
from consilience.models import make
from consilience.parts import parse_stack

LR, BATCH, SAMPLES, TEST = 0.005, 10, 400, 2000
COLUMNS = {"float32": {}, "channels_last": {"layout": "channels_last"},
           "bfloat16 + channels_last": {"layout": "channels_last", "precision": "bfloat16"}}


def data(clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = clients * SAMPLES + TEST
    return rng.integers(rng.key(0, "x"), 256, (n, 1, 28, 28)).to(torch.uint8), rng.integers(rng.key(0, "y"), 10, (n,))


def product(clients: int, workers: int, settings: dict[str, str]) -> tuple[Federation, Any]:
    """A federation and a function that runs one round with evaluation."""
    x, y = data(clients)
    rows = tuple(torch.arange(clients * SAMPLES).split(SAMPLES))
    built = make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))
    fed = Federation(built.module, built.layout, parse_stack("fedavg").method(), Population(x, y, rows, 10, as_float),
                     Policy(lr=LR, batch=BATCH, **settings), Workers.of(workers))
    test = torch.arange(clients * SAMPLES, clients * SAMPLES + TEST)

    def turn() -> None:
        fed.round()
        score_global(fed, [test], ["test"])
    return fed, turn


def bare(pipe: Any, clients: int, share: int, of: int) -> None:
    """A process with the loop a person would write; runs its clients' steps whenever it is told a setting."""
    torch.set_num_threads(1)
    x, y = data(clients)
    mine = range(share, clients, of)
    test = torch.arange(clients * SAMPLES, clients * SAMPLES + TEST)[share::of]
    pipe.send("ready")
    while settings := pipe.recv():
        last = settings.get("layout") == "channels_last"
        half = lambda: torch.autocast("cpu", torch.bfloat16) if settings.get("precision") else contextlib.nullcontext()
        form = {"memory_format": torch.channels_last} if last else {}
        for client in mine:
            net = make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model")).module.to(**form)
            optimiser = torch.optim.SGD(net.parameters(), lr=LR)
            order = torch.arange(client * SAMPLES, (client + 1) * SAMPLES)[torch.randperm(SAMPLES)]
            for rows in order.split(BATCH):
                optimiser.zero_grad()
                xb = (x[rows].float() / 255).contiguous(**form)
                with half():
                    logits = net(xb)
                F.cross_entropy(logits.float(), y[rows]).backward()
                optimiser.step()
        with torch.no_grad(), half():
            correct = sum((net((x[rows].float() / 255).contiguous(**form)).argmax(1) == y[rows]).sum() for rows in test.split(256))
        pipe.send(int(correct))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=usable_cores())
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    clients, turns = (8, 2) if options.quick else (20, 5)
    steps = clients * SAMPLES // BATCH
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(options.workers)]
    for share, (_, theirs) in enumerate(ends):
        context.Process(target=bare, args=(theirs, clients, share, options.workers), daemon=True).start()
    loops = [ours for ours, _ in ends]
    for pipe in loops:
        pipe.recv()

    def bare_turn(settings: dict[str, str]) -> None:
        for pipe in loops:
            pipe.send(settings or {"layout": "contiguous"})
        for pipe in loops:
            pipe.recv()

    made = {name: product(clients, options.workers, settings) for name, settings in COLUMNS.items()}
    for name, settings in COLUMNS.items():
        made[name][1]()
        bare_turn(settings)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for name, settings in COLUMNS.items():
            for side, run in (("product", made[name][1]), ("bare", lambda s=settings: bare_turn(s))):
                start = time.perf_counter()
                run()
                seconds.setdefault((name, side), []).append(time.perf_counter() - start)
    for pipe in loops:
        pipe.send(None)
    for fed, _ in made.values():
        fed.engine.close()

    def ratio(over: tuple[str, str], under: tuple[str, str]) -> float:
        return statistics.median(a / b for a, b in zip(seconds[over], seconds[under]))
    print(f"{options.workers} workers on {usable_cores()} cores; {clients} clients, {steps} client-steps a turn, {turns} turns")
    print(f"{'':26s}{'bare loops':>12s}{'workers':>12s}   ratio   over bare float32")
    for name in COLUMNS:
        rate = {side: steps / statistics.median(seconds[name, side]) for side in ("bare", "product")}
        print(f"{name:26s}{rate['bare']:10.0f}/s{rate['product']:10.0f}/s{ratio((name, 'bare'), (name, 'product')):8.2f}"
              f"{ratio(('float32', 'bare'), (name, 'product')):12.2f}")
    print(f"{ratio(('float32', 'bare'), ('float32', 'product')):.3f}")


if __name__ == "__main__":
    main()
