"""Where the processor time of a round goes on one thread: shares of the round, from the round itself down to single operations.

    python benchmarks/profile_cpu.py [METHOD]

DBE's 4-layer CNN, batch 10, 4 clients of 40 steps, the sequential engine. The profiler slows Python down but not the operations, so the
machinery's shares are upper bounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import torch
from overhead import product_round

ROUNDS, SMALLEST = 3, 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="fedavg")
    method = parser.parse_args().method
    torch.set_num_threads(1)
    turn = product_round(method)
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(ROUNDS):
        turn()
    profile.disable()
    stats = pstats.Stats(profile)
    whole = stats.total_tt      # type: ignore[attr-defined]
    print(f"{whole / ROUNDS * 1000:.0f} ms a round\n{'with callees':>14s}{'itself':>9s}{'calls':>8s}")
    for (file, line, name), (_, calls, own, with_callees, _) in sorted(stats.stats.items(), key=lambda kv: -kv[1][3]):      # type: ignore[attr-defined]
        ours = "consilience" in file
        if with_callees / whole >= SMALLEST and (ours or own / whole >= 2 * SMALLEST):
            place = f"{file.rpartition('consilience/')[2]}:{line} {name}" if ours else name
            print(f"{with_callees / whole:14.1%}{own / whole:9.1%}{calls // ROUNDS:8d}   {place}")


if __name__ == "__main__":
    main()
