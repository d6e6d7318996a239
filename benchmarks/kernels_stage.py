"""The fused kernels of convolution stages and linear layers against PyTorch's, and how their blocks are best cut.

    python benchmarks/kernels_stage.py [--search] [--only forward]

Times are of one call among forty in a CUDA graph, one stream. `--search` tries the sizes of blocks; kernels are compiled by several
processes first.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F

from consilience.kernels import linear, stage

CALLS = 40
STAGES = {"DBE stage 1": (10, 1, 28, 32, 5), "DBE stage 2": (10, 32, 12, 64, 5), "MOON stage 1": (128, 3, 32, 6, 5),
          "MOON stage 2": (128, 6, 14, 16, 5)}
LINEAR = {"DBE neck": (10, 512, 1024), "DBE head": (10, 10, 512), "MOON 1": (128, 120, 400), "MOON 2": (128, 84, 120),
          "MOON 4": (128, 256, 84), "MOON head": (128, 10, 256)}


def microseconds(act: Callable[[], Any]) -> float:
    """Of one call, in a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            act()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 5 / CALLS * 1e6


def stage_calls(name: str) -> dict[str, Callable[[], Any]]:
    n, c, side, co, k = STAGES[name]
    torch.manual_seed(0)
    x, w, b = torch.randn(n, c, side, side, device="cuda"), torch.randn(co, c, k, k, device="cuda") * 0.1, torch.randn(co, device="cuda")
    ph = (side - k + 1) // 2
    g = torch.randn(n, co, ph, ph, device="cuda")
    leaves = [t.requires_grad_() for t in ((w, b) if c in (1, 3) else (x, w, b))]
    shape = (n * ph * ph, c, side, side, ph, ph, co, k, 0)
    place = torch.randint(0, 5, g.shape, device="cuda", dtype=torch.uint8)
    plain = lambda: F.max_pool2d(F.relu(F.conv2d(x, w, b)), 2)
    ours = lambda: stage.conv_relu_pool(x, w, b, 0)
    out = {"theirs forward": plain, "theirs both": lambda: torch.autograd.grad(plain(), leaves, g),
           "forward": ours, "both": lambda: torch.autograd.grad(ours(), leaves, g),
           "weights": lambda: stage._weights_gradient(x, g, place, w, *shape)}
    if c not in (1, 3):
        out["inputs"] = lambda: stage._inputs_gradient(x, g, place, w, *shape)
    return out


def linear_calls(name: str) -> dict[str, Callable[[], Any]]:
    m, n, k = LINEAR[name]
    x, w, b = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((m, k), (n, k), (n,)))
    g = torch.randn(m, n, device="cuda")
    plain = lambda: F.relu(F.linear(x, w, b))
    ours = lambda: linear.linear(x, w, b, True)
    return {"theirs forward": plain, "theirs both": lambda: torch.autograd.grad(plain(), (x, w, b), g),
            "forward": ours, "both": lambda: torch.autograd.grad(ours(), (x, w, b), g)}


def choices(module: Any, kind: str) -> list[tuple[str, dict[str, int]]]:
    """Which function of a module says the blocks, and what it might say."""
    if module is linear:
        grid = ((16, 32), (16, 32), (64, 128, 256), (4,)) if kind == "forward" else ((16, 32), (16, 32, 64), (32, 64), (4,))
        where = "forward_blocks" if kind == "forward" else "backward_blocks"
    else:
        grid = {"forward": ((16, 32, 64, 128), (32, 64), (32, 64, 128), (4,)), "weights": ((16, 32, 64), (32, 64), (64, 128), (4,))}[kind]
        where = f"{kind}_blocks"
    return [(where, dict(zip(("BM", "BN", "BK", "num_warps"), c))) for c in itertools.product(*grid)]


def attempt(job: tuple[str, str, dict[str, int]], timed: bool) -> float | None:
    name, kind, how = job
    module = stage if name in STAGES else linear
    where = choices(module, kind)[0][0]
    before = getattr(module, where)
    setattr(module, where, lambda *a: how)
    try:
        act = (stage_calls if name in STAGES else linear_calls)(name)[kind]
        if timed:
            return microseconds(act)
        act()
        torch.cuda.synchronize()
    except Exception:
        return None
    finally:
        setattr(module, where, before)
    return None


def compile_only(job: tuple[str, str, dict[str, int]]) -> None:
    attempt(job, timed=False)


def search(only: str | None, names: tuple[str, ...]) -> None:
    jobs = []
    for name in names:
        kinds = ("forward", "weights") if name in STAGES else ("forward", "both")
        for kind in kinds:
            if only and kind != only:
                continue
            module = stage if name in STAGES else linear
            width = LINEAR[name][1] if name in LINEAR else 4 * STAGES[name][3]
            for _, how in choices(module, kind):
                if how["BN"] <= max(16, 2 * width - 1) and how["BM"] * how["BK"] <= 1 << 13:
                    jobs.append((name, kind, how))
    print(len(jobs), "attempts", flush=True)
    start = time.perf_counter()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_only, jobs, chunksize=8))
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for (name, kind), mine in itertools.groupby(jobs, key=lambda job: job[:2]):
        tries = sorted((us, list(job[2].values())) for job in mine if (us := attempt(job, timed=True)))
        print(f"{name}, {kind}:", *(f"{us:.1f} {how}" for us, how in tries[:5]), sep="\n    ", flush=True)


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--search", action="store_true")
    args.add_argument("--only", help="forward, weights or both")
    args.add_argument("--no-linear", action="store_true")
    given = args.parse_args()
    for name in (*STAGES, *LINEAR):
        acts = (stage_calls if name in STAGES else linear_calls)(name)
        print(name, {kind: round(microseconds(act), 1) for kind, act in acts.items()}, flush=True)
    if given.search:
        search(given.only, (*STAGES, *(() if given.no_linear else LINEAR)))


if __name__ == "__main__":
    main()
