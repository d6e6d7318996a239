"""Does a round stay as cheap when the population grows? SCAFFOLD, 50 clients a round, 1,000 to 100,000 clients.

    python benchmarks/population.py                     # the table, then the largest ratio alone on the last line
    python benchmarks/population.py --sizes 1000 10000 --rounds 10

Each population runs in a process of its own: images of 28×28, 20 a client, mapped from files on disk; a multilayer perceptron
of 50,890 parameters, so that a client's variate takes 200 KB; states in a DiskStore; two workers. Time is the median over rounds after
a warm-up; memory is what the training process and its workers hold resident at the end (Linux: VmRSS, pages of mapped files
included, and what of it is anonymous). Ratios are against the smallest population.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population, RowTable
from consilience.data import as_float
from consilience.engines.store import DiskStore
from consilience.engines.workers import Workers
from consilience.models import make
from consilience.parts import parse_stack

SAMPLES, COHORT, WARM_UP, WORKERS = 20, 50, 5, 2


PIECE = 1000 * SAMPLES


def mapped(path: Path, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """A tensor on disk, written a piece at a time and mapped."""
    rows = 0
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece.numpy().data)
            rows += len(piece)
    return torch.from_file(str(path), shared=True, size=rows * piece[0].numel(), dtype=piece.dtype).view(rows, *piece.shape[1:])


def images(pieces: int) -> Iterator[torch.Tensor]:
    block = rng.integers(rng.key(0, "x"), 256, (PIECE, 1, 28, 28)).to(torch.uint8)
    return (block for _ in range(pieces))


def resident(pids: list[int]) -> tuple[float, float]:
    """MiB resident in these processes, and MiB of that which no file backs."""
    total, anonymous = 0, 0
    for pid in pids:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        total += int(lines["VmRSS"].split()[0])
        anonymous += int(lines["RssAnon"].split()[0])
    return total / 1024, anonymous / 1024


def one(clients: int, rounds: int, folder: Path) -> dict[str, float]:
    """Rounds on one population."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    pieces = clients // 1000
    x = mapped(folder / "x.bin", images(pieces))
    y = mapped(folder / "y.bin", (rng.integers(rng.key(0, "y", i), 10, (PIECE,)) for i in range(pieces)))
    rows = RowTable(mapped(folder / "rows.bin", (torch.arange(i * PIECE, (i + 1) * PIECE) for i in range(pieces))),
                    torch.arange(0, len(x) + 1, SAMPLES))
    built = make("mlp(hidden=64)", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))
    written = time.perf_counter()
    fed = Federation(built.module, built.layout, parse_stack("scaffold").method(), Population(x, y, rows, 10, as_float),
                     Policy(lr=0.05, batch=10, participation=COHORT), Workers.of(WORKERS), store=DiskStore.inside(folder))
    parameters = sum(p.numel() for p in fed.model["params"].values())
    ready = time.perf_counter()
    seconds = []
    for number in range(WARM_UP + rounds):
        begin = time.perf_counter()
        fed.round()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begin)
    workers = [p.process.pid for p in fed.engine.pool.processes]
    total, anonymous = resident([os.getpid(), *workers])
    begin = time.perf_counter()
    fed.clients.save(folder, "checkpoint")
    out = {"clients": clients, "parameters": parameters, "data": written - start, "build": ready - written,
           "round": statistics.median(seconds), "resident": total, "anonymous": anonymous,
           "checkpoint": time.perf_counter() - begin, "disk": (folder / "states.bin").stat().st_size / 2**20}
    fed.engine.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(one(options.one, options.rounds, Path(folder))))
        return
    results = []
    for size in options.sizes:
        done = subprocess.run([sys.executable, __file__, "--one", str(size), "--rounds", str(options.rounds)], stdout=subprocess.PIPE,
                              text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    base = results[0]
    print(f"SCAFFOLD, {base['parameters']:.0f} parameters, {COHORT} clients a round, {WORKERS} workers, {options.rounds} rounds")
    print(f"{'clients':>8s}{'build':>9s}{'round':>10s}{'ratio':>7s}{'resident':>12s}{'ratio':>7s}{'anonymous':>12s}{'ratio':>7s}"
          f"{'checkpoint':>12s}{'states':>10s}")
    worst = 0.0
    for r in results:
        ratio = {k: r[k] / base[k] for k in ("round", "resident", "anonymous")}
        worst = max(worst, ratio["round"], ratio["resident"])
        print(f"{r['clients']:8.0f}{r['build']:8.2f}s{r['round'] * 1000:8.0f}ms{ratio['round']:7.2f}"
              f"{r['resident']:9.0f}MiB{ratio['resident']:7.2f}{r['anonymous']:9.0f}MiB{ratio['anonymous']:7.2f}"
              f"{r['checkpoint'] * 1000:10.0f}ms{r['disk']:7.0f}MiB")
    print(f"{worst:.3f}")


if __name__ == "__main__":
    main()
