"""Normalisation's fused kernels against PyTorch's layers, forward and backward inside a CUDA graph, at the sizes of our models.

    python benchmarks/kernels_norm.py            # ResNet-18 in bfloat16 with channels_last, FedBR's CNN in float32
    python benchmarks/kernels_norm.py --all      # both types in both layouts

BatchNorm, the sum with a shortcut and the ReLU, for a batch of 64; ReLU and GroupNorm for a batch of 32. A graph holds 20 forward and
backward passes, one after another; times are microseconds of one pass, the median of ten replays. `alone`: one kernel each way;
`shared`: two; `*` marks which of them runs. One stream waits for each kernel in turn, so this is a client's time, not a full GPU's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.kernels import batch_norm, group_norm

PASSES, REPLAYS = 20, 10
RESNET = [(64, 64, 8, 8), (64, 128, 4, 4), (64, 256, 2, 2), (64, 512, 1, 1), (64, 64, 16, 16), (64, 64, 32, 32)]
GROUPED = [(32, 64, 28, 28), (32, 128, 14, 14)]


def time_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> float:
    """Microseconds of a forward and a backward pass."""
    grad = torch.ones_like(forward())

    def passes() -> None:
        for _ in range(PASSES):
            torch.autograd.grad(forward(), leaves, grad)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        passes()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    taken = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1000 / PASSES)
    return statistics.median(taken)


def maps(shape: tuple[int, ...], name: str, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    x = rng.normal(rng.key(0, name), shape).to("cuda", dtype)
    return x.contiguous(memory_format=layout).requires_grad_()


def batch(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> str:
    norm = nn.BatchNorm2d(shape[1]).cuda()
    x, add = maps(shape, "x", dtype, layout), maps(shape, "add", dtype, layout)
    leaves, usual = [x, add, norm.weight, norm.bias], batch_norm.ALONE
    plain = time_of(lambda: F.relu(norm(x) + add), leaves)
    chosen = "shared" if batch_norm._Geometry(x, batch_norm.TILE).shared else "alone"
    times = {}
    for way, alone in (("alone", 1 << 40), ("shared", 0)):
        batch_norm.ALONE = alone
        times[way] = time_of(lambda: batch_norm.norm_relu(norm, x, add, True), leaves)
    batch_norm.ALONE = usual
    both = "".join(f"{t:11.1f}{'*' if way == chosen else ' '}" for way, t in times.items())
    return f"{plain:12.1f}{both}{plain / times[chosen]:9.2f}"


def group(shape: tuple[int, ...], layout: torch.memory_format) -> str:
    norm, x = nn.GroupNorm(8, shape[1]).cuda(), maps(shape, "x", torch.float32, layout)
    leaves = [x, norm.weight, norm.bias]
    plain = time_of(lambda: norm(F.relu(x)), leaves)
    ours = time_of(lambda: group_norm.relu_norm(norm, x), leaves)
    return f"{plain:12.1f}{ours:11.1f}*{'':12s}{plain / ours:9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="both types in both layouts")
    everything = parser.parse_args().all
    last, usual = torch.channels_last, torch.contiguous_format
    ways = [(torch.bfloat16, last)] + [(torch.float32, last), (torch.bfloat16, usual), (torch.float32, usual)] * everything
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':52s}{'PyTorch':>12s}{'alone':>11s} {'shared':>11s} {'ratio':>9s}")
    for dtype, layout in ways:
        for shape in RESNET:
            name = f"BatchNorm + sum + ReLU {str(dtype)[6:]} {'last' if layout is last else 'contiguous'}"
            print(f"{name:38s}{'×'.join(map(str, shape)):>14s}{batch(shape, dtype, layout)}", flush=True)
    for layout in [usual] + [last] * everything:
        for shape in GROUPED:
            name = f"ReLU + GroupNorm float32 {'last' if layout is last else 'contiguous'}"
            print(f"{name:38s}{'×'.join(map(str, shape)):>14s}{group(shape, layout)}", flush=True)


if __name__ == "__main__":
    main()
