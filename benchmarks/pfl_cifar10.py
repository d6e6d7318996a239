"""pfl-research's own CIFAR-10 benchmark: IID, 1,000 users with 50 points each, 50 a round, one epoch, batch 10, learning rate 0.1.

    python benchmarks/pfl_cifar10.py [--rounds 1500] [--device cuda] [--data cifar10] [--model pfl_cnn]

pfl-research's own CNN (two convolutions, dropout), scored on the test set every 10 rounds. Prints the minutes of all rounds, evaluation
included, and the best and last accuracy; the time until the first round is done (data, capture) stands apart. Training that becomes
non-finite is reported with the rounds it lasted: at this learning rate fedavg_cnn, which has no dropout, does so in round 816.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import consilience
from consilience.errors import NonFiniteError
from consilience.runs.run import Listener


class Clock(Listener):
    """When each round ended."""

    def __init__(self) -> None:
        self.begun, self.ends = time.perf_counter(), []

    def round_done(self, record: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) % 100 == 0:
            print(f"round {len(self.ends)}: {self.ends[-1] - self.ends[0]:.1f} s", flush=True)

    def seconds(self) -> float:
        """Of all rounds. The first, which waits for data and capture, counts as long as the others on average, unless it is alone."""
        done = len(self.ends)
        return (self.ends[-1] - self.ends[0]) / (done - 1) * done if done > 1 else sum(self.ends) - self.begun * done


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--rounds", type=int, default=1500)
    args.add_argument("--device", default="cuda")
    args.add_argument("--data", default="cifar10")
    args.add_argument("--model", default="pfl_cnn")
    given = args.parse_args()
    clock = Clock()
    try:
        out = measure(given, clock)
    except NonFiniteError as error:
        out = {"rounds": len(clock.ends), "of": given.rounds, "seconds": round(clock.seconds(), 1), "ended": str(error)}
    print(json.dumps(out))
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "pfl_cifar10.json"), "w") as file:
            json.dump(out, file)


def measure(given: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    result = consilience.run(method="fedavg", data=given.data, split="iid", clients=1000, participation=50, rounds=given.rounds, epochs=1,
                             batch=10, lr=0.1, model=given.model, eval_every=10, test="global", transform="normalise", device=given.device,
                             seed=0, listener=clock)
    scores = [r["global"]["test"] or r["global"]["accuracy"] for r in result.records if r["global"]]
    seconds = clock.seconds()
    return {"rounds": given.rounds, "minutes": round(seconds / 60, 2), "ms_per_round": round(seconds / given.rounds * 1000, 1),
            "seconds_until_first_round_done": round(clock.ends[0] - clock.begun, 1), "best": max(scores), "last": scores[-1],
            "engine": result.measured.get("engine"), "device": given.device}


if __name__ == "__main__":
    main()
