"""The slots engine on a GPU against the plain loop that simulators use, side by side in one run, evaluation included.

    python benchmarks/slots.py [cnn vgg11 resnet18] [--methods] [--rounds 3] [--epochs 1]

`training` beside a rate counts the seconds of the rounds alone, without evaluation. Clients take 25 to 260 steps in a round of
one epoch; with more epochs, on both sides, sending and averaging models weigh less, and `training` nears the rate of steps alone.

The plain loop: a DataLoader per client over tensors on the host, `.to(device)`, module, cross-entropy, SGD; clients one after another;
the model averaged and scored on all test samples after every round. The product does the same rounds in the slots engine. Rates are
client-steps per second of whole rounds, after a warm-up; ratios are product over plain loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines.slots import Slots
from consilience.metrics.accuracy import score_global, score_personal
from consilience.models import make
from consilience.parts import parse_stack

WORK = {
    "cnn": {"model": "fedavg_cnn", "sample": (1, 28, 28), "clients": 20, "batch": 10, "samples": 2600, "lr": 0.005},
    "vgg11": {"model": "vgg11", "sample": (3, 32, 32), "clients": 10, "batch": 32, "samples": 1600, "lr": 0.01},
    "resnet18": {"model": "resnet18(stem='3x3')", "sample": (3, 32, 32), "clients": 10, "batch": 64, "samples": 1600, "lr": 0.01},
}
METHODS = {"fedavg": {}, "scaffold": {}, "moon": {}, "fedbr": {}, "lfd": {}, "fedfm": {"fedfm.start": 0}, "fedfa": {}, "dbe": {}}
# forward and backward passes of a step, in units of FedAvg's forward (1) + backward (2) = 3
PASSES = {"fedavg": 3, "scaffold": 3, "moon": 5, "fedbr": 6, "lfd": 5, "fedfm": 3, "fedfa": 3, "dbe": 3}


def population(w: dict) -> Population:
    n, c = w["samples"], w["clients"]
    x = (rng.uniform(rng.key(0, "x"), (c * n, *w["sample"])) * 255).to(torch.uint8)
    y = rng.integers(rng.key(0, "y"), 10, (c * n,))
    return Population(x, y, tuple(torch.arange(c * n).split(n)), 10, as_float)


def plain(w: dict, rounds: int, epochs: int = 1) -> float:
    """Client-steps per second of the plain loop."""
    data = population(w)
    x = data.x.float() / 255
    net = make(w["model"], sample=w["sample"], classes=10, key=rng.key(0, "model")).module.cuda()
    loaders = [DataLoader(TensorDataset(x[r], data.y[r]), w["batch"], shuffle=True, drop_last=True) for r in data.rows]
    test = DataLoader(TensorDataset(x[:5000], data.y[:5000]), 256)
    steps, start = 0, 0.0
    for number in range(rounds + 1):
        if number == 1:
            torch.cuda.synchronize()
            start, steps = time.perf_counter(), 0
        received = {k: v.clone() for k, v in net.state_dict().items()}
        trained = []
        for loader in loaders if number else loaders[:1]:          # one client warms up
            net.load_state_dict(received)
            net.train()
            opt = torch.optim.SGD(net.parameters(), w["lr"])
            for xb, yb in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
                xb, yb = xb.cuda(), yb.cuda()
                opt.zero_grad()
                F.cross_entropy(net(xb), yb).backward()
                opt.step()
                steps += 1
            trained.append({k: v.clone() for k, v in net.state_dict().items()})
        net.load_state_dict({k: torch.stack([t[k].float() for t in trained]).mean(0).to(v.dtype) for k, v in received.items()})
        net.eval()
        with torch.no_grad():
            right = sum((net(xb.cuda()).argmax(1) == yb.cuda()).sum().item() for xb, yb in test)
    torch.cuda.synchronize()
    assert right >= 0
    return steps / (time.perf_counter() - start)


class Rates(NamedTuple):
    """Client-steps per second of whole rounds with their evaluation, and of the rounds' own seconds; what the engine noted."""

    whole: float
    training: float
    notes: list[str]


def product(w: dict, rounds: int, method: str = "fedavg", settings: dict | None = None, epochs: int = 1, **policy: object) -> Rates:
    """The slots engine."""
    data = population(w)
    built = make(w["model"], sample=w["sample"], classes=10, key=rng.key(0, "model"))
    fed = Federation(built.module, built.layout, parse_stack(method, settings).method(), data,
                     Policy(lr=w["lr"], batch=w["batch"], epochs=epochs, weights="uniform", eval_batch=1000, **policy), Slots, "cuda")
    test = [torch.arange(5000)]
    seconds = {"training": 0.0, "scoring": 0.0}
    for number in range(rounds + 2):                  # the first two capture and warm up
        for what in seconds:
            torch.cuda.synchronize()
            start = time.perf_counter()
            if what == "training":
                fed.round()
            else:
                (score_personal if fed.personal else score_global)(fed, test, ["test"])
            torch.cuda.synchronize()
            seconds[what] += time.perf_counter() - start if number >= 2 else 0.0
    steps = rounds * epochs * w["clients"] * (w["samples"] // w["batch"])
    return Rates(steps / sum(seconds.values()), steps / seconds["training"], fed.engine.notes)


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("work", nargs="*", default=list(WORK), help="or none")
    args.add_argument("--methods", action="store_true", help="the methods' cost over FedAvg's on the CNN")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--epochs", type=int, default=1, help="of a round, on both sides")
    given = args.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    out: dict[str, dict] = {}
    for name in [n for n in given.work if n != "none"]:
        w = WORK[name]
        bare = plain(w, 1, given.epochs)
        kinds: dict[str, dict] = {"float32": {"layout": "contiguous"}}
        if name != "cnn":
            turned = {"layout": "channels_last"}
            kinds |= {"channels_last": turned, "bf16 + channels_last": {**turned, "precision": "bfloat16"}}
        out[name] = {"plain": round(bare)}
        for kind, policy in kinds.items():
            rates = product(w, given.rounds, epochs=given.epochs, **policy)
            out[name][kind] = {"rate": round(rates.whole), "times plain": round(rates.whole / bare, 1), "training": round(rates.training)}
            print(name, f"plain {bare:.0f}", kind, out[name][kind], *rates.notes, flush=True)
    if given.methods:
        base = None
        for method, settings in METHODS.items():
            rates = product(WORK["cnn"], given.rounds, method, settings, given.epochs)
            base = base or rates.whole
            out[method] = {"rate": round(rates.whole), "times fedavg": round(base / rates.whole, 2), "passes": round(PASSES[method] / 3, 2)}
            print(method, out[method], *rates.notes, flush=True)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "slots.json"), "w") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
