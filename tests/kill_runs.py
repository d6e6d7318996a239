"""Kill runs with SIGKILL at random moments, let them go on, and compare with undisturbed runs byte for byte.

    python tests/kill_runs.py                       fifty kills over three methods
    python tests/kill_runs.py --kills 5 --methods scaffold+dbe
    python tests/kill_runs.py --store disk          with the clients' states in a file

Some kills come from outside at a random time. The others strike inside a write: before or after a file is flushed,
between two renames, or with half of the file written. A run is killed one to four times before it is let through to its end.
Every run is a process of its own, forked from one that has imported the package already.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import consilience
from consilience.data import load

METHODS = ("scaffold+dbe", "moon", "fedfa+ditto")
SETTINGS: dict[str, Any] = {"clients": 5, "rounds": 6, "steps": 3, "participation": 0.6, "dropout": 0.2, "train": 0.2, "validation": 0.1,
                            "momentum": 0.9, "patience": 4, "seed": 3}


STORE = "memory"                        # where clients' states lie between rounds


def train(method: str, folder: Path) -> None:
    kept = "reset" if "scaffold" in method else "kept"           # SCAFFOLD needs to know the length of its path
    consilience.run(method, "digits", out=folder, device="cpu", optimiser_state=kept, store=STORE, **SETTINGS)


def strike_in_write(number: int) -> None:
    """Make this process kill itself at its `number`-th call that touches the disk. Every third time half a file is left."""
    calls = 0

    def armed(real: Any, torn: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                if torn and number % 3 == 0 and stat.S_ISREG(os.fstat(args[0]).st_mode):
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)       # of records too, which is more than a crash takes
                elif number % 3 == 1:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    os.fsync, os.replace, shutil.rmtree = armed(os.fsync, True), armed(os.replace, False), armed(shutil.rmtree, False)


def in_child(method: str, folder: Path, in_write: int = 0, after: float = 0.0) -> str:
    """Run in a process of its own; 'killed' or 'finished'."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if in_write:
                strike_in_write(in_write)
            train(method, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if after:
        end = time.monotonic() + after
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.002)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    else:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed"
    if os.WEXITSTATUS(status):
        raise SystemExit(f"{method}: the process that went on in {folder} failed")
    return "finished"


def contents(folder: Path) -> dict[str, Any]:
    """What must be equal: records without times, every model's bytes, the end."""
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    out: dict[str, Any] = {f"record of round {r['round']}": {k: v for k, v in r.items() if k != "measured"} for r in records}
    out["rounds in order"] = [r["round"] for r in records]
    for name in ("final", "best"):
        out |= {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / name).rglob("*")) if p.is_file()}
    return out | {name: (folder / name).read_bytes() for name in ("done", "config.json")}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(a.keys() ^ b.keys()) + [k for k in a if k in b and a[k] != b[k]]


def torment(method: str, kills: int, place: Path, draw: random.Random) -> Counter[str]:
    """Kill runs of one method `kills` times in all; every one must end like the undisturbed run."""
    undisturbed = place / "undisturbed"
    start = time.monotonic()
    in_child(method, undisturbed)
    seconds = time.monotonic() - start
    expected, told = contents(undisturbed), Counter[str]()
    trial = 0
    while told["outside"] + told["inside a write"] < kills:
        trial += 1
        folder = place / f"trial-{trial}"
        for _ in range(draw.randint(1, 4)):
            if told["outside"] + told["inside a write"] == kills:
                break
            inside = draw.random() < 0.5
            how = {"in_write": draw.randint(1, 60)} if inside else {"after": draw.uniform(0.02, 1.0) * seconds}
            if in_child(method, folder, **how) == "killed":
                told["inside a write" if inside else "outside"] += 1
        in_child(method, folder)
        wrong = differences(expected, contents(folder))
        if wrong:
            raise SystemExit(f"{method}, trial {trial} in {folder}: not as undisturbed: {', '.join(wrong)}")
        told["runs"] += 1
        shutil.rmtree(folder)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="over all methods")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--store", choices=("memory", "disk"), default=STORE)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    globals()["STORE"] = given.store
    torch.set_num_threads(1)                # before anything runs, so that forked processes have no threads to miss
    load("digits")                          # what is imported on first use is imported here, once
    draw = random.Random(given.seed)
    total = 0
    for i, method in enumerate(given.methods):
        share = given.kills // len(given.methods) + (i < given.kills % len(given.methods))
        with tempfile.TemporaryDirectory() as place:
            told = torment(method, share, Path(place), draw)
        total += told["outside"] + told["inside a write"]
        print(f"{method}: {told['outside']} kills from outside, {told['inside a write']} inside a write; "
              f"{told['runs']} runs went on and ended equal to the undisturbed one", flush=True)
    print(f"{total} kills, no difference")


if __name__ == "__main__":
    sys.exit(main())
