"""What the machinery costs: whole rounds of the product against hand-written PyTorch loops of the same steps.

    python benchmarks/overhead.py            # the table, then FedAvg's ratio alone on the last line
    python benchmarks/overhead.py --quick    # FedAvg only

Both sides run interleaved in one process, on one thread, on the same tensors: DBE's 4-layer CNN on 28×28 images, batch 10. A
product round includes loading the clients, their steps, what parts keep and upload, and the aggregation; FedAvg's bare loop
has the steps alone; the other methods' loops are the whole method: clients start from the received model, their models are
averaged, and what the method does once a round is done (FedFM's anchors, SCAFFOLD's variates). Ratios are medians over pairs;
1.00 means that the machinery costs nothing.
"""

from __future__ import annotations

import statistics
import sys
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


def hand_round(method: str) -> Callable[[], None]:
    """The loop a person would write for one method alone: module, backward, torch.optim.SGD; the steps of a whole round."""
    data = population()
    net, fixed, old = model(), model().eval(), model().eval()
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


def ratio(a: Callable[[], None], b: Callable[[], None], pairs: int) -> float:
    """Median of a's time over b's, run in turns."""
    a()
    b()
    out = []
    for k in range(pairs):
        times = {}
        for name, f in (("a", a), ("b", b)) if k % 2 else (("b", b), ("a", a)):
            start = time.perf_counter()
            f()
            times[name] = time.perf_counter() - start
        out.append(times["a"] / times["b"])
    return statistics.median(out)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    quick = "--quick" in sys.argv
    pairs = 15
    noise = ratio(hand_round("fedavg"), hand_round("fedavg"), pairs)
    print(f"4-layer CNN, batch {BATCH}, {CLIENTS} clients × {STEPS} steps a round, one thread; bare / bare {noise:.3f}")
    print(f"{'method':10s} product ÷ hand-written loop of the same method")
    ratios = {}
    for method in METHODS[:1] if quick else METHODS:
        ratios[method] = ratio(product_round(method), hand_round(method), pairs)
        print(f"{method:10s} {ratios[method]:.3f}", flush=True)
    print(f"{ratios['fedavg']:.3f}")


if __name__ == "__main__":
    main()
