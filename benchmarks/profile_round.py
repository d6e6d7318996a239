"""Where a round of the slots engine spends its time: the host's functions, and the GPU's share.

    python benchmarks/profile_round.py [method]
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time

import torch
from slots import WORK, population

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.engines.slots import Slots
from consilience.metrics.accuracy import score_global
from consilience.models import make
from consilience.parts import parse_stack

w, data = WORK["cnn"], population(WORK["cnn"])
built = make(w["model"], sample=w["sample"], classes=10, key=rng.key(0, "model"))
fed = Federation(built.module, built.layout, parse_stack(sys.argv[1] if len(sys.argv) > 1 else "fedavg").method(), data,
                 Policy(lr=w["lr"], batch=w["batch"], weights="uniform", eval_batch=1000), Slots, "cuda")
for _ in range(2):
    fed.round()
torch.cuda.synchronize()
start = time.perf_counter()
for _ in range(3):
    fed.round()
torch.cuda.synchronize()
middle = time.perf_counter()
for _ in range(3):
    score_global(fed, [torch.arange(5000)], ["test"])
print(f"round {(middle - start) / 3 * 1000:.0f} ms, scoring {(time.perf_counter() - middle) / 3 * 1000:.0f} ms")
with cProfile.Profile() as profile:
    for _ in range(3):
        fed.round()
    torch.cuda.synchronize()
pstats.Stats(profile).sort_stats("tottime").print_stats(22)
