"""Does a round stay as cheap when the population grows? SCAFFOLD, 50 clients a round, 1,000 to 100,000 clients.

    python benchmarks/population.py                     # a table; the last lines are the ratios and, alone, the largest of them
    python benchmarks/population.py --sizes 1000 10000 --rounds 10

A whole run with a folder, as `consilience run` makes it: images of 28×28, 20 a client, in a folder of .npy files that are mapped;
a multilayer perceptron of 50,890 parameters, so that a client's variate takes 200 KB; states on disk; workers; records,
checkpoints, and every fifth round an evaluation on 1,000 clients. Each population runs in a process of its own, twice, by turns;
the faster run's times count, and the most memory.

Time is the median over the rounds after a warm-up, evaluation apart: wall clock, and processor time of the training process and
its workers together. Memory is what these processes hold resident after a round (Linux: VmRSS, pages of mapped files included),
the median over the same rounds. "start" is everything before the first round, with its processor time and the most memory that
the training process held until then. Ratios are against the smallest population.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import consilience
from consilience import rng
from consilience.runs.run import Listener

SAMPLES, COHORT, WARM_UP, EVERY = 20, 50, 5, 5
PIECE = 1000 * SAMPLES
MEMORY = ("resident", "anonymous", "start peak")
TICKS = os.sysconf("SC_CLK_TCK")


def write_data(clients: int, folder: Path) -> None:
    """x.npy, y.npy and client.npy, a piece at a time."""
    rows = clients * SAMPLES
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (rows, 1, 28, 28))
    block = rng.integers(rng.key(0, "x"), 256, (PIECE, 1, 28, 28)).to(torch.uint8).numpy()
    for start in range(0, rows, PIECE):
        x[start: start + PIECE] = block[: rows - start]
    x.flush()
    np.save(folder / "y.npy", rng.integers(rng.key(0, "y"), 10, (rows,)).numpy())
    np.save(folder / "client.npy", np.repeat(np.arange(clients), SAMPLES))


def status(pid: int) -> dict[str, int]:
    lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines if value.strip().endswith("kB")}


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Watch(Listener):
    """After every round: the time, processor time and memory of the training process and its workers."""

    def __init__(self) -> None:
        self.begin, self.rows = time.perf_counter(), []
        self.start: dict[str, float] = {}
        self.line = ""

    def started(self, federation: Any, rounds: int, done: int) -> None:
        self.federation = federation
        own = status(os.getpid())
        self.start = {"seconds": time.perf_counter() - self.begin, "processor": processor_seconds(os.getpid()), "peak": own["VmHWM"]}

    def noted(self, message: str) -> None:
        self.line = self.line or message

    def round_done(self, record: dict[str, Any]) -> None:
        pids = [os.getpid(), *(p.process.pid for p in self.federation.engine.pool.processes)]
        held = [status(pid) for pid in pids]
        self.rows.append({"at": time.perf_counter(), "processor": sum(map(processor_seconds, pids)), "scored": record["global"] is not None,
                          "resident": sum(h["VmRSS"] for h in held), "anonymous": sum(h["RssAnon"] for h in held)})


def one(clients: int, rounds: int, folder: Path) -> dict[str, Any]:
    """A run on one population."""
    watch = Watch()
    result = consilience.run("scaffold", f"arrays(path={str(folder / 'data')!r})", out=folder / "run", listener=watch,
                             model="mlp(hidden=64)", participation=COHORT, rounds=WARM_UP + rounds, lr=0.05, batch=10,
                             engine="workers", store="disk", eval_every=EVERY, device="cpu")
    pairs = list(zip(watch.rows, watch.rows[1:]))[WARM_UP - 1:]
    took = lambda what, scored: statistics.median(b[what] - a[what] for a, b in pairs if b["scored"] == scored)
    parts = {f"{what} {kind}": took(name, scored) for kind, scored in (("round", False), ("scored round", True))
             for what, name in (("wall", "at"), ("processor", "processor"))}
    held = {what: statistics.median(b[what] for _, b in pairs) for what in ("resident", "anonymous")}
    fed = result.federation
    return {"clients": clients, "parameters": sum(p.numel() for p in fed.model["params"].values()), "line": watch.line,
            "workers": result.measured["processes"], **parts, **held,
            **{f"start {k}": v for k, v in watch.start.items()}, "visited": len(list(fed.clients.numbers())),
            "disk": sum(p.stat().st_size for p in (folder / "run").rglob("*") if p.is_file()),
            "records": (folder / "run" / "records.jsonl").stat().st_size / len(result.records)}


def measure(sizes: list[int], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """In processes of their own: one writes the data, others train, the populations by turns. Of repeated runs the fastest times count,
    and the most memory.
    """
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        command = lambda size: [sys.executable, __file__, "--one", str(size), "--rounds", str(rounds), "--folder", f"{place}/{size}"]
        for size in sizes:
            subprocess.run([*command(size), "--write"], check=True)
        for turn in range(repeats):
            for i, size in enumerate(sizes):
                done = subprocess.run(command(size), stdout=subprocess.PIPE, text=True, check=True)
                new = json.loads(done.stdout.splitlines()[-1])
                shutil.rmtree(f"{place}/{size}/run")
                if turn:
                    best = {k: (max if k in MEMORY else min)(new[k], v) for k, v in results[i].items() if isinstance(v, float)}
                    results[i] = {**new, **best}
                else:
                    results.append(new)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    for name, kind in (("--one", int), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one and given.write:
        (given.folder / "data").mkdir(parents=True)
        write_data(given.one, given.folder / "data")
        return
    if given.one:
        print(json.dumps(one(given.one, given.rounds, given.folder)))
        return
    show(measure(given.sizes, given.rounds, given.repeats), given.rounds)


def show(results: list[dict[str, Any]], rounds: int) -> None:
    base, mib = results[0], 2**20
    print(f"SCAFFOLD, {base['parameters']} parameters, {COHORT} clients a round, {base['workers']} workers, {rounds} rounds, PyTorch "
          f"{torch.__version__}")
    print(results[-1]["line"])
    heads = ("clients", "start", "start CPU", "start peak", "round", "round CPU", "scored", "scored CPU", "resident", "anonymous",
             "visited", "folder", "record")
    print("".join(f"{h:>11s}" for h in heads))
    for r in results:
        cells = [f"{r['clients']:,}", f"{r['start seconds']:.1f} s", f"{r['start processor']:.1f} s", f"{r['start peak'] / mib:.0f} MiB",
                 *(f"{r[f'{what} {kind}'] * 1000:.0f} ms" for kind in ("round", "scored round") for what in ("wall", "processor")),
                 *(f"{r[what] / mib:.0f} MiB" for what in ("resident", "anonymous")), f"{r['visited']:,}", f"{r['disk'] / mib:.0f} MiB",
                 f"{r['records'] / 1024:.0f} KiB"]
        print("".join(f"{c:>11s}" for c in cells))
    names = {"wall round": "a round", "processor round": "its CPU time", "wall scored round": "with evaluation",
             "processor scored round": "its CPU time", "resident": "resident memory"}
    for r in results[1:]:
        print(f"{r['clients']:,} against {base['clients']:,}: " + ", ".join(f"{label} {r[k] / base[k]:.3f}" for k, label in names.items()))
    print(f"{max(r[k] / base[k] for r in results for k in ('wall round', 'wall scored round', 'resident')):.3f}")


if __name__ == "__main__":
    main()
