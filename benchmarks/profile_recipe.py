"""Where a round of a recipe's run goes on a GPU: training, scoring, and the kernels of a step.

    python benchmarks/profile_recipe.py dbe/table5:dbe:fmnist [--rounds 3] [-o precision=bfloat16] [--host] [--like-real FOLDER]
    python benchmarks/profile_recipe.py fedfm/table3:fedavg:missing5 -o precision=bfloat16 -o epochs=1 --processors

`--host` lists the host's functions. `--like-real` writes random data in the true format into a folder first and uses them, for
machines without the data sets: where time goes does not depend on what is in the pictures. `--slots 1` trains one client at a time.

`--processors` says how much of the GPU each kernel holds: its time, times the share of the processors that its blocks fill by their
threads and shared memory. Where clients run beside each other, and these add up to the time of a step, it is processors that they wait
for. Give it a short round (`-o epochs=1`): the trace is written to a file and read again.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import gzip
import json
import os
import pstats
import struct
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from consilience.engines.estimate import steps_per_round
from consilience.engines.slots import Slots
from consilience.recipes.collect import runs_of
from consilience.recipes.load import load_recipe
from consilience.recipes.orders import Order, parse_asked
from consilience.runs.config import RunConfig
from consilience.runs.run import build_federation, load_data
from consilience.runs.scoring import score_round


def like_real(folder: Path) -> None:
    """Random CIFAR-10, MNIST and Fashion-MNIST."""
    draw = np.random.default_rng(0)
    cifar = folder / "cifar-10-batches-bin"
    cifar.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        rows = draw.integers(0, 256, (10000, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(cifar / name)
    for name in ("mnist", "fashion-mnist"):
        (folder / name).mkdir(exist_ok=True)
        for part, n in (("train", 60000), ("t10k", 10000)):
            pictures = draw.integers(0, 256, (n, 28, 28), dtype=np.uint8).tobytes()
            labels = draw.integers(0, 10, n, dtype=np.uint8).tobytes()
            with gzip.open(folder / name / f"{part}-images-idx3-ubyte.gz", "wb", 1) as file:
                file.write(struct.pack(">IIII", 2051, n, 28, 28) + pictures)
            with gzip.open(folder / name / f"{part}-labels-idx1-ubyte.gz", "wb", 1) as file:
                file.write(struct.pack(">II", 2049, n) + labels)


def configuration(asked: str, changes: list[str]) -> RunConfig:
    name, rows, columns = parse_asked(asked)
    recipe, order = load_recipe(name), Order(rows=rows, columns=columns, seeds=1)
    cell = order.cells_of(recipe)[0]
    _, values, _ = next(iter(runs_of(recipe, Path("."), order, cell, [0])))
    given = dict(c.split("=", 1) for c in changes)
    of_parts = {name: given.pop(name) for name in list(given) if "." in name}
    return RunConfig.make(values | given | {"settings": values.get("settings", {}) | of_parts})


def kernels(fed: object, steps: int) -> None:
    """The GPU's kernels during one round, by name: how many a step, and microseconds each."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fed.round()                                                                     # type: ignore[attr-defined]
        torch.cuda.synchronize()
    count, spent = collections.Counter[str](), collections.Counter[str]()
    for e in seen.profiler.kineto_results.events():           # the list that PyTorch makes of them takes minutes
        if e.device_type() == torch.autograd.DeviceType.CUDA:
            count[e.name()] += 1
            spent[e.name()] += e.duration_ns() / 1000
    print(f"  {sum(count.values()) / steps:.1f} kernels a step, {sum(spent.values()) / steps:.0f} µs of them a step")
    for name, us in spent.most_common(45):
        print(f"    {count[name] / steps:6.2f} a step  {us / count[name]:7.1f} µs  {us / steps:7.1f} µs/step  {name[:130]}")


def processors(fed: object, steps: int) -> None:
    """How much of the GPU the kernels of one round hold, by name and number of blocks. What registers allow is not looked at."""
    gpu = torch.cuda.get_device_properties(0)
    room = getattr(gpu, "shared_memory_per_multiprocessor", 228 << 10)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fed.round()                                                                     # type: ignore[attr-defined]
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(path := os.path.join(folder, "trace.json"))
        with open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "kernel"]
    count, spent, held = (collections.Counter[tuple[str, int]]() for _ in range(3))
    for e in events:
        blocks, threads = (int(np.prod(e["args"][k])) for k in ("grid", "block"))
        shared = e["args"].get("shared memory", 0) + 1024              # what CUDA itself takes for a block included
        beside = max(1, min(gpu.max_threads_per_multi_processor // max(threads, 32), room // shared, 32))
        what = e["name"], blocks
        count[what] += 1
        spent[what] += e["dur"]
        held[what] += e["dur"] * min(1.0, blocks / beside / gpu.multi_processor_count)
    print(f"  {sum(held.values()) / steps:.0f} µs a step of the whole GPU")
    for what, us in held.most_common(30):
        name, blocks = what
        print(f"    {us / steps:6.1f} µs/step  {count[what] / steps:6.2f} a step  {spent[what] / count[what]:6.1f} µs  {blocks:6d} blocks  "
              f"{name[:100]}")


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("cells", nargs="*")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("-o", action="append", default=[])
    args.add_argument("--host", action="store_true")
    args.add_argument("--no-kernels", action="store_true")
    args.add_argument("--processors", action="store_true")
    args.add_argument("--slots", type=int)
    args.add_argument("--like-real")
    given = args.parse_args()
    if given.like_real:
        like_real(Path(given.like_real))
        os.environ["CONSILIENCE_DATA"] = given.like_real
    for asked in given.cells:
        config = configuration(asked, given.o)
        data = load_data(config)
        fed = build_federation(config, data)
        if fed.device.type == "cuda":
            fed.engine = Slots(fed.program, fed.make_slot, **({"most": given.slots} if given.slots else {}))
        if not fed.prepared:
            fed.prepare()
        for _ in range(2):
            fed.round()
            score_round(fed, data, config.run.eval_clients)
        steps = round(steps_per_round(fed))
        torch.cuda.synchronize()
        spent = {"round": 0.0, "scoring": 0.0}
        acts = {"round": fed.round, "scoring": partial(score_round, fed, data, config.run.eval_clients)}
        host = cProfile.Profile()
        if given.host:
            host.enable()
        for _ in range(given.rounds):
            for what, act in acts.items():
                start = time.perf_counter()
                act()
                torch.cuda.synchronize()
                spent[what] += (time.perf_counter() - start) / given.rounds
        host.disable()
        print(f"{asked}: round {spent['round'] * 1000:.0f} ms, scoring {spent['scoring'] * 1000:.0f} ms; {steps} steps, "
              f"{steps / spent['round']:.0f} a second", *getattr(fed.engine, 'notes', []), flush=True)
        if given.host:
            pstats.Stats(host).sort_stats("tottime").print_stats(25)
        if not given.no_kernels:
            kernels(fed, steps)
        if given.processors:
            processors(fed, steps)
        del fed, data, acts


if __name__ == "__main__":
    main()
