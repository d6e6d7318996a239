"""What the machinery costs: whole rounds of the product against hand-written PyTorch loops of the same steps.

    python benchmarks/overhead.py                   # the table, then FedAvg's ratio alone on the last line
    python benchmarks/overhead.py fedavg scaffold   # some methods only; --quick: FedAvg only
    python benchmarks/overhead.py --busy            # processor time in place of the clock, where others use the machine

Both sides run interleaved in one process, on one thread, on the same tensors: DBE's 4-layer CNN on 28×28 images, batch 10. A
product round includes loading the clients, their steps, what parts keep and upload, and the aggregation; FedAvg's bare loop
has the steps alone; the other methods' loops are the whole method: clients start from the received model, their models are
averaged, and what the method does once a round is done (FedFM's anchors, SCAFFOLD's variates). Ratios are medians over turns;
1.00 means that the machinery costs nothing.

The product computes convolution, ReLU and pooling together (layers/stages.py) and pools other contiguous maps with a faster kernel than
PyTorch's own layer chooses (layers/pooling.py). The first column is against the loop as a person writes it; the second gives that loop
our layers too, so that nothing but the machinery differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines import Sequential
from consilience.layers.pooling import pool_swiftly
from consilience.layers.stages import compute_together
from consilience.models import make
from consilience.parts import parse_stack

LR, BATCH, STEPS, CLIENTS = 0.005, 10, 40, 4
SETTINGS = {"fedfm": {"fedfm.start": 0, "fedfm.weight": 2.0}, "fedfa": {"ffa.stages": [1]}}
METHODS = ("fedavg", "fedprox", "scaffold", "moon", "fedfm", "fedfa", "dbe")


def population() -> Population:
    n = STEPS * BATCH
    x = rng.normal(rng.key(0, "x"), (CLIENTS * n, 1, 28, 28))
    y = rng.integers(rng.key(0, "y"), 10, (CLIENTS * n,))
    return Population(x, y, tuple(torch.arange(CLIENTS * n).split(n)), 10, as_float)


def model() -> nn.Module:
    return make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model")).module


def product_round(method: str) -> Callable[[], None]:
    built = make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))
    stack = parse_stack(method, SETTINGS.get(method))
    fed = Federation(built.module, built.layout, stack.method(), population(), Policy(lr=LR, batch=BATCH), Sequential)
    fed.round()
    fed.round()                                   # previous models exist from now on
    return lambda: (fed.round(), None)[1]


def hand_round(method: str, our_layers: bool = False) -> Callable[[], None]:
    """The loop a person would write for one method alone: module, backward, torch.optim.SGD; the steps of a whole round."""
    data = population()
    net, fixed, old = model(), model().eval(), model().eval()
    for module in (net, fixed, old) if our_layers else ():
        pool_swiftly(module)
        compute_together(module)
    stages = list(net.named_children())
    body = lambda m, t: _through(list(m.children())[:-1], t)
    head = list(net.children())[-1]
    opt = torch.optim.SGD(net.parameters(), LR)
    pairs = [(p, q.detach()) for p, q in zip(net.parameters(), fixed.parameters())]
    correction = [torch.randn_like(q) * 1e-4 for _, q in pairs]
    anchors = F.normalize(torch.randn(10, 512))
    mean, shift = torch.randn(512), torch.zeros(512, requires_grad=True)
    own = torch.optim.SGD([shift], LR)
    state = {"running": torch.zeros(512), "mu": torch.zeros(32), "sigma": torch.ones(32)}

    def augmented(h: torch.Tensor) -> torch.Tensor:
        """FedFA with every draw made: no branch on the coin, as a captured step must do it."""
        var, mu = torch.var_mean(h, (2, 3))
        sd = (var + 1e-6).sqrt()
        b = mu + (2 * (mu.var(0) + 1e-6)).sqrt() * torch.randn_like(mu)
        g = sd + (2 * (sd.var(0) + 1e-6)).sqrt() * torch.randn_like(mu)
        state["mu"] = 0.99 * state["mu"] + 0.01 * mu.detach().mean(0)
        state["sigma"] = 0.99 * state["sigma"] + 0.01 * sd.detach().mean(0)
        e = lambda t: t[:, :, None, None]
        return torch.where(torch.rand(()) < 0.5, (h - e(mu)) / e(sd) * e(g) + e(b), h)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if method in ("fedavg", "scaffold"):
            return F.cross_entropy(net(x), y)
        if method == "fedprox":
            return F.cross_entropy(net(x), y) + 0.005 * sum((p - q).square().sum() for p, q in pairs)
        if method == "fedfa":
            h = augmented(stages[0][1](x))
            return F.cross_entropy(_through([m for _, m in stages[1:]], h), y)
        z = body(net, x)
        if method == "moon":
            with torch.no_grad():
                zg, zp = body(fixed, x), body(old, x)
            near, far = F.cosine_similarity(z, zg), F.cosine_similarity(z, zp)
            return F.cross_entropy(head(z), y) + F.softplus((far - near) / 0.5).mean()
        if method == "fedfm":
            return F.cross_entropy(head(z), y) + 2 * F.cross_entropy(F.normalize(z) @ anchors.T / 0.1, y)
        r = z.mean(0)
        return F.cross_entropy(head(z + shift), y) + 0.5 * F.mse_loss(r, mean)

    def whole_round() -> None:
        if method == "fedfm":                     # the pass that makes the anchors
            with torch.no_grad():
                sums = sum(F.one_hot(data.y[i], 10).float().T @ body(fixed, data.x[i]) for r in data.rows for i in r.split(256))
            anchors.copy_(F.normalize(sums))
        trained = []
        for rows in data.rows:
            if method != "fedavg":
                with torch.no_grad():
                    for p, q in pairs:
                        p.copy_(q)
            for index in rows[torch.randperm(len(rows))].reshape(STEPS, BATCH):
                opt.zero_grad()
                own.zero_grad()
                loss(data.x[index], data.y[index]).backward()
                if method == "scaffold":
                    for (p, _), c in zip(pairs, correction):
                        p.grad.add_(c)
                opt.step()
                if method == "dbe":
                    own.step()
            if method == "scaffold":              # the client's new variate and what it uploads
                with torch.no_grad():
                    new = [c + (q - p) / (STEPS * LR) for c, (p, q) in zip(correction, pairs)]
                    [n - c for n, c in zip(new, correction)]
            if method != "fedavg":
                trained.append([p.detach().clone() for p, _ in pairs])
        if trained:
            with torch.no_grad():
                for n, (_, q) in enumerate(pairs):
                    q.copy_(sum(t[n] for t in trained) / len(trained))
    return whole_round


def _through(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for m in modules:
        x = m(x)
    return x


def ratios(product: Callable[[], None], others: list[Callable[[], None]], turns: int, clock: Callable[[], float]) -> list[float]:
    """Median of the product's time over each of the others', all run by turns."""
    sides = [product, *others]
    for side in sides:
        side()
    out: list[list[float]] = [[] for _ in others]
    for turn in range(turns):
        times = [0.0] * len(sides)
        for k in range(len(sides)):
            number = (turn + k) % len(sides)          # no side is always first
            start = clock()
            sides[number]()
            times[number] = clock() - start
        for kept, other in zip(out, times[1:]):
            kept.append(times[0] / other)
    return [statistics.median(kept) for kept in out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = time.thread_time if options.busy else time.perf_counter
    noise, = ratios(hand_round("fedavg"), [hand_round("fedavg")], options.turns, clock)
    print(f"4-layer CNN, batch {BATCH}, {CLIENTS} clients × {STEPS} steps a round, one thread; bare / bare {noise:.3f}")
    print(f"{'method':10s}{'product ÷ hand-written loop':>30s}{'÷ that loop with our layers':>32s}")
    chosen = METHODS[:1] if options.quick else options.methods or METHODS
    first: dict[str, float] = {}
    for method in chosen:
        first[method], same = ratios(product_round(method), [hand_round(method), hand_round(method, our_layers=True)], options.turns, clock)
        print(f"{method:10s}{first[method]:30.3f}{same:32.3f}", flush=True)
    if "fedavg" in first:
        print(f"{first['fedavg']:.3f}")


if __name__ == "__main__":
    main()
