"""Our convolution kernels against cuDNN's: ResNet-18 with ImageNet's stem on 32×32 pictures, batch 64, and FedBR's CNN, batch 32.

    PYTHONPATH=src python benchmarks/kernels_conv.py                     # all; about two minutes on an H200
    PYTHONPATH=src python benchmarks/kernels_conv.py --quick --shapes layer1,layer3 --passes weights

bfloat16, channels_last. `alone`: one stream; `ten`: ten streams, each with tensors and a CUDA graph of its own, launched together, as
clients that train beside each other: that is what counts. Microseconds of one operation, the median of a few replays. Every candidate is
compared with PyTorch's convolution in float32 and, twice, with itself; one that is wrong is named and not timed. The best by `ten` is
shown, and at the end the entries of `small_conv.TAKEN` that won by more than 3 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")         # as the package does; before CUDA starts

import torch
from torch import Tensor

SOURCE = Path(__file__).resolve().parents[1] / "src" / "consilience"
for name, folder in (("consilience", SOURCE), ("consilience.kernels", SOURCE / "kernels")):      # without what the package itself imports
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules.setdefault(name, package)

from consilience.kernels import small_conv as ours  # noqa: E402
from consilience.kernels.small_conv import PASSES, Layer, Tiles  # noqa: E402

STREAMS, REPEATED, REPLAYS, IN_A_ROW = 10, 20, 5, 3
WON = 0.97


class Case(NamedTuple):
    samples: int
    layer: Layer
    times: int                  # in a step of ResNet-18
    passes: tuple[str, ...] = PASSES


CASES = {
    "stem": Case(64, Layer(16, 19, 19, 64, 4, 4, 1, 0, 0), 1, ("forward", "weights")),      # folded
    "layer1": Case(64, Layer(64, 8, 8, 64, 3, 3, 1, 1, 1), 4),
    "layer2.first": Case(64, Layer(64, 8, 8, 128, 3, 3, 2, 1, 1), 1),
    "layer2.short": Case(64, Layer(64, 8, 8, 128, 1, 1, 2, 0, 0), 1),
    "layer2": Case(64, Layer(128, 4, 4, 128, 3, 3, 1, 1, 1), 3),
    "layer3.first": Case(64, Layer(128, 4, 4, 256, 3, 3, 2, 1, 1), 1),
    "layer3.short": Case(64, Layer(128, 4, 4, 256, 1, 1, 2, 0, 0), 1),
    "layer3": Case(64, Layer(256, 2, 2, 256, 3, 3, 1, 1, 1), 3),
    "layer4.first": Case(64, Layer(256, 2, 2, 512, 2, 2, 2, 0, 0), 1),                      # what is in reach
    "layer4.short": Case(64, Layer(256, 2, 2, 512, 1, 1, 2, 0, 0), 1),
    "layer4": Case(64, Layer(512, 1, 1, 512, 1, 1, 1, 0, 0), 3),
    "fedbr.first": Case(32, Layer(64, 28, 28, 128, 3, 3, 2, 1, 1), 0),
    "fedbr": Case(32, Layer(128, 14, 14, 128, 3, 3, 1, 1, 1), 0),
}


def candidates(way: str, case: Case, quick: bool) -> list[Tiles]:
    """Up to eight; those that are larger than the layer are cut to it, so that some fall together."""
    layer, n = case.layer, case.samples
    if way == "weights":
        programs = layer.kh * layer.kw * max(1, layer.co // 64) * max(1, layer.c // 64)
        turns = layer.oh * layer.ow
        pieces = [p for p in (1, 2, 4, 8, 16) if p == 1 or (programs * p <= 300 and turns >= 4 * p)]
        found = [Tiles(64, 64, 64, 4, 3, p) for p in pieces[-3:]]
        found += [Tiles(64, 64, 64, 4, 2, pieces[-1]), Tiles(64, 32, 64, 4, 3, pieces[-1] if len(pieces) < 2 else pieces[-2]),
                  Tiles(32, 32, 64, 4, 3, pieces[0]), Tiles(128, 64, 64, 4, 2, pieces[-1]), Tiles(64, 64, 32, 4, 4, pieces[-1]),
                  Tiles(64, 128, 64, 4, 2, pieces[-1])]
        largest = layer.co, layer.c, n
    else:
        found = [Tiles(64, 64, 64, 4, 3), Tiles(64, 32, 64, 4, 3), Tiles(64, 64, 64, 4, 2), Tiles(64, 128, 64, 4, 2),
                 Tiles(64, 32, 128, 4, 2), Tiles(64, 64, 32, 4, 4), Tiles(32, 64, 64, 4, 3), Tiles(64, 16, 128, 4, 3)]
        largest = (n, layer.co, layer.c) if way == "forward" else (n, layer.c, layer.co)
    cut = [t._replace(m=min(t.m, largest[0]), n=min(t.n, largest[1]), k=min(t.k, largest[2])) for t in found]
    return list(dict.fromkeys(cut))[:3 if quick else 8]


def compile_one(job: tuple[str, Case, Tiles]) -> str | None:
    """In a process of its own, into Triton's cache, by the same way as a launch."""
    way, (n, layer, _, _), (m, columns, k, warps, stages, pieces) = job
    half, kernel = torch.bfloat16, {"forward": ours._forward, "maps": ours._maps, "weights": ours._weights}[way]
    more: dict[str, Any] = {"PIECES": pieces, "WHOLE": n % k == 0} if way == "weights" else {"WHOLE": n % m == 0}
    try:
        kernel.warmup(half, half, half if pieces == 1 else torch.float32, n, *layer.sizes, BM=m, BN=columns, BK=k, WIDE=False, **more,
                      grid=(1,), num_warps=warps, num_stages=stages)
    except Exception as error:          # the launch will say it again
        return f"{way} {layer} {job[2]}: {error!r}"
    return None


class Tensors:
    """Of one client."""

    def __init__(self, case: Case, seed: int, device: str) -> None:
        layer, n = case.layer, case.samples
        draw = torch.Generator(device=device).manual_seed(seed)
        make = lambda *shape: torch.randn(shape, generator=draw, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
        self.x, self.g = make(n, layer.c, layer.h, layer.w), make(n, layer.co, layer.oh, layer.ow)
        self.weight = make(layer.co, layer.c, layer.kh, layer.kw)

    def theirs(self, way: str, layer: Layer, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        if way == "forward":
            return torch.conv2d(x, weight, None, layer.stride, (layer.pad_h, layer.pad_w))
        mask = [way == "maps", way == "weights", False]
        both = torch.ops.aten.convolution_backward(g, x, weight, None, [layer.stride] * 2, [layer.pad_h, layer.pad_w], [1, 1], False,
                                                   [0, 0], 1, mask)
        return both[0] if way == "maps" else both[1]

    def cudnn(self, way: str, layer: Layer) -> Tensor:
        return self.theirs(way, layer, self.x, self.g, self.weight)

    def exact(self, way: str, layer: Layer) -> Tensor:
        return self.theirs(way, layer, self.x.float(), self.g.float(), self.weight.float())

    def ours(self, way: str, layer: Layer, tiles: Tiles) -> Tensor:
        if way == "forward":
            return ours.forward(self.x, self.weight, layer, tiles)
        if way == "maps":
            return ours.maps_gradient(self.g, self.weight, layer, tiles)
        return ours.weights_gradient(self.g, self.x, self.weight, layer, tiles)


def wrong(got: Tensor, exact: Tensor, again: Tensor) -> str | None:
    """One rounding to bfloat16 is at most 2⁻⁸ of a number; sums of float32 in another order are far below that."""
    off = ((got.float() - exact).abs().max() / exact.abs().max()).item()
    if not off <= 2.0**-8:
        return f"off by {off:.2e} of the largest"
    return None if torch.equal(got, again) else "two runs differ"


def graphs_of(act: Callable[[Tensors], Tensor], clients: list[Tensors], streams: list[Any]) -> list[Any]:
    made = []
    for client, stream in zip(clients, streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            act(client)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):             # torch.cuda.graph would collect garbage for every one of thousands
            graph.capture_begin()
            for _ in range(REPEATED):
                act(client)
            graph.capture_end()
        made.append(graph)
    torch.cuda.synchronize()
    return made


def time_of(graphs: list[Any], streams: list[Any]) -> float:
    """Microseconds of one operation where these graphs run beside each other. The streams wait until the host has launched all."""
    taken = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        for stream in streams[:len(graphs)]:
            stream.wait_event(start)
        for _ in range(IN_A_ROW):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        for stream in streams[:len(graphs)]:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1000 / (len(graphs) * REPEATED * IN_A_ROW))
    return statistics.median(taken[1:])


def both_times(act: Callable[[Tensors], Tensor], clients: list[Tensors], streams: list[Any]) -> tuple[float, float]:
    graphs = graphs_of(act, clients, streams)
    times = time_of(graphs[:1], streams), time_of(graphs, streams)
    graphs.clear()
    torch.cuda.empty_cache()                        # what the graphs held
    return times


def compare(name: str, way: str, found: list[Tiles], clients: list[Tensors], streams: list[Any]) -> tuple[float, float, Tiles | None]:
    """Prints a line. cuDNN's time of ten, ours, and how."""
    layer = CASES[name].layer
    exact = clients[0].exact(way, layer)
    alone, ten = both_times(lambda client: client.cudnn(way, layer), clients, streams)
    times: dict[Tiles, tuple[float, float]] = {}
    for tiles in found:
        try:
            fault = wrong(clients[0].ours(way, layer, tiles), exact, clients[0].ours(way, layer, tiles))
            if fault is None:
                times[tiles] = both_times(lambda client, tiles=tiles: client.ours(way, layer, tiles), clients, streams)  # type: ignore[misc]
        except Exception as error:
            fault = repr(error)[:200]
        if fault is not None:
            print(f"  WRONG {name} {way} {tuple(tiles)}: {fault}", flush=True)
    if not times:
        print(f"{name:14s}{way:9s}{alone:9.2f}{'-':>9s}{ten:9.2f}{'-':>9s}", flush=True)
        return ten, ten, None
    best = min(times, key=lambda t: times[t][1])
    others = "  ".join(f"{','.join(map(str, t))}: {a:.2f} {b:.2f}" for t, (a, b) in times.items() if t != best)
    print(f"{name:14s}{way:9s}{alone:9.2f}{times[best][0]:9.2f}{ten:9.2f}{times[best][1]:9.2f}  {','.join(map(str, best)):22s}| {others}",
          flush=True)
    return ten, times[best][1], best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three candidates a case")
    parser.add_argument("--shapes", help="those whose names begin so, with commas")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="that compile")
    given = parser.parse_args()
    names = [n for n in CASES if not given.shapes or n.startswith(tuple(given.shapes.split(",")))]
    work = [(name, way) for name in names for way in CASES[name].passes if way in given.passes.split(",")]
    found = {(name, way): candidates(way, CASES[name], given.quick) for name, way in work}
    jobs = [(way, CASES[name], tiles) for (name, way), several in found.items() for tiles in several]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for fault in pool.imap_unordered(compile_one, jobs):
            if fault:
                print(f"  DOES NOT COMPILE {fault[:400]}", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {len(jobs)} variants compiled, {time.perf_counter() - began:.0f} s",
          flush=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False       # as engines have it
    torch.backends.cudnn.allow_tf32 = False
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    print(f"{'shape':14s}{'pass':9s}{'cudnn':>9s}{'ours':>9s}{'cudnn':>9s}{'ours':>9s}\n{'':23s}{'alone':>9s}{'alone':>9s}{'ten':>9s}{'ten':>9s}"
          "  m,n,k,warps,stages,pieces; the other candidates: alone, ten", flush=True)
    sums, won = dict.fromkeys(PASSES, (0.0, 0.0)), []
    for name in names:
        case = CASES[name]
        clients = [Tensors(case, seed, "cuda") for seed in range(STREAMS)]
        for way in (w for n, w in work if n == name):
            theirs, best, tiles = compare(name, way, found[name, way], clients, streams)
            usual, ours_too = sums[way]
            sums[way] = usual + case.times * theirs, ours_too + case.times * min(theirs, best)
            if tiles is not None and best < WON * theirs:
                won.append(f"    ({way!r}, Layer{tuple(case.layer)}): Tiles{tuple(tiles)},    # {name}: {theirs:.2f} -> {best:.2f}")
    for way, (usual, better) in sums.items():
        print(f"a step of ResNet-18, {way:8s}: cuDNN {usual:7.1f}, the better of both {better:7.1f}", flush=True)
    print(f"a step of ResNet-18, all     : cuDNN {sum(a for a, _ in sums.values()):7.1f}, the better of both "
          f"{sum(b for _, b in sums.values()):7.1f}; {time.perf_counter() - began:.0f} s in all")
    print("\n".join(["TAKEN = {", *won, "}"]), flush=True)


if __name__ == "__main__":
    main()
