"""Small classifiers trained side by side, each on a subset of the same features from a start of its own.

Forward and backward passes are written out: three layers need a dozen products, and nothing is allotted anew at each step. On an
accelerator many probes share one step, for a step of one probe is too small to keep it busy; on a CPU products are what takes the time,
and one probe after another loses the least where training has to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import rng

AHEAD = 128                    # steps whose batches are drawn at once
ACCELERATOR_BYTES = 4 << 30    # what probes trained at once may take


@dataclass(frozen=True)
class Probe:
    """An MLP on the flattened representation, trained by Adam without regularisation; its last state counts."""

    steps: int = 4000
    batch: int = 256
    lr: float = 1e-4
    hidden: int = 512
    precision: str = "float32"         # of the products; weights and Adam keep 32 bits

    def widths(self, features: int, classes: int) -> tuple[int, ...]:
        return features, self.hidden, self.hidden, classes


@dataclass(frozen=True)
class Task:
    """One probe: the rows it learns from, and the key of its start and of its batches."""

    size: int
    seed: int
    rows: Tensor
    key: Tensor

    @property
    def name(self) -> str:
        return f"{self.size}/{self.seed}"


def train_probes(x: Tensor, y: Tensor, tasks: Sequence[Task], held: slice, classes: int, probe: Probe, together: int,
                 tell: Callable[[int], None] = lambda steps: None) -> Iterator[tuple[Task, float]]:
    """(task, loss on the rows held back) of every task, in groups of at most `together`. `tell` hears the steps made since it last did.

    A batch is the whole subset where that is no larger than the batch size; else subsets are passed in a new order each epoch,
    an epoch's rest filled up from the next.
    """
    for group in _groups(tasks, probe.batch, together):
        weights = _train(x, y, group, classes, probe, tell)
        for place, task in enumerate(group):
            logits = _forward([w[place: place + 1] for w in weights], x[held][None])[0]
            yield task, float(F.cross_entropy(logits.double(), y[held]))


def fit_together(features: int, classes: int, probe: Probe, device: torch.device) -> int:
    """How many probes are trained at once."""
    if device.type == "cpu":
        return 1
    widths = probe.widths(features, classes)
    held = 4 * sum((a + 1) * b for a, b in pairwise(widths))                  # weights, gradients, two averages of Adam's
    seen = probe.batch * (features + 4 * probe.hidden + 2 * AHEAD)
    return max(1, ACCELERATOR_BYTES // (4 * (held + seen)))


def _groups(tasks: Sequence[Task], batch: int, together: int) -> Iterator[list[Task]]:
    """Probes that can be trained side by side: whole subsets apart from drawn batches, and of like size where they are filled up."""
    for kind in (False, True):
        own = sorted((t for t in tasks if (t.size > batch) is kind), key=lambda t: (t.size, t.seed))
        yield from (own[i: i + together] for i in range(0, len(own), together))


@torch.no_grad()
def _train(x: Tensor, y: Tensor, group: Sequence[Task], classes: int, probe: Probe, tell: Callable[[int], None]) -> list[Tensor]:
    """The weights of a group of probes after training."""
    device, kind = x.device, getattr(torch, probe.precision)
    weights = initial(probe.widths(x.shape[1], classes), group, device)
    for w in weights:
        w.requires_grad_()
        w.grad = torch.empty_like(w)
    optimiser = _adam(weights, probe.lr)
    width = min(probe.batch, max(t.size for t in group))
    step = _Step(x.to(kind), F.one_hot(y, classes).float(), weights, width)
    drawing = group[0].size > probe.batch
    rows = torch.stack([F.pad(t.rows, (0, max(u.size for u in group) - t.size)) for t in group]).to(device)
    # a sample's share in the mean over its probe's batch; nothing for the places that only fill up
    share = torch.stack([(torch.arange(width) < t.size).float() / min(t.size, width) for t in group]).to(device)[:, :, None]
    orders = [Order(rng.key(t.key, "order", t.seed).to(device), t.size) for t in group] if drawing else []
    for start in range(0, probe.steps, AHEAD):
        count = min(AHEAD, probe.steps - start)
        if drawing:
            places = torch.stack([o.next(count * width) for o in orders])
            batches = rows.gather(1, places).view(len(group), count, width)
        for i in range(count):
            step.gradients(batches[:, i] if drawing else rows, share)
            optimiser.step()
        tell(count * len(group))
    return [w.detach() for w in weights]


class _Step:
    """The gradients of the summed losses of all probes, written into `grad` of their weights."""

    def __init__(self, x: Tensor, answers: Tensor, weights: Sequence[Tensor], width: int) -> None:
        self.x, self.answers, self.weights = x, answers, weights
        count, hidden = weights[0].shape[0], weights[0].shape[2]
        make = lambda columns: torch.empty(count, width, columns, dtype=x.dtype, device=x.device)
        self.seen, self.first, self.second, self.out = make(x.shape[1]), make(hidden), make(hidden), make(answers.shape[1])
        self.to_second, self.to_first = make(hidden), make(hidden)

    def gradients(self, rows: Tensor, share: Tensor) -> None:
        kind = self.x.dtype
        w1, b1, w2, b2, w3, b3 = (w.detach().to(kind) for w in self.weights)
        torch.index_select(self.x, 0, rows.flatten(), out=self.seen.view(-1, self.x.shape[1]))
        torch.baddbmm(b1, self.seen, w1, out=self.first).relu_()
        torch.baddbmm(b2, self.first, w2, out=self.second).relu_()
        torch.baddbmm(b3, self.second, w3, out=self.out)
        error = self.out.float().softmax(2).sub_(self.answers[rows]).mul_(share).to(kind)
        self.keep(4, self.second, error)
        torch.bmm(error, w3.mT, out=self.to_second)
        error = torch.ops.aten.threshold_backward(self.to_second, self.second, 0)
        self.keep(2, self.first, error)
        torch.bmm(error, w2.mT, out=self.to_first)
        self.keep(0, self.seen, torch.ops.aten.threshold_backward(self.to_first, self.first, 0))

    def keep(self, layer: int, below: Tensor, error: Tensor) -> None:
        weight, bias = (self.weights[layer + i].grad for i in (0, 1))
        assert weight is not None
        assert bias is not None
        if weight.dtype == error.dtype:
            torch.bmm(below.mT, error, out=weight)
        else:
            weight.copy_(torch.bmm(below.mT, error))
        torch.sum(error, 1, keepdim=True, dtype=bias.dtype, out=bias)


def initial(widths: Sequence[int], group: Sequence[Task], device: Any) -> list[Tensor]:
    """Weights and biases uniform in ±1/√fan_in, as torch's Linear draws them; drawn where they will lie."""
    out = []
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        for kind, shape in (("weight", (fan_in, fan_out)), ("bias", (1, fan_out))):
            drawn = [rng.uniform(rng.key(t.key, kind, layer, t.seed).to(device), shape) for t in group]
            out.append((2 * torch.stack(drawn) - 1) / math.sqrt(fan_in))
    return out


def _adam(weights: list[Tensor], lr: float) -> torch.optim.Adam:
    """Fused where this version of torch can do that on this device; a third of the time of a step on small subsets."""
    try:
        return torch.optim.Adam(weights, lr=lr, fused=True)
    except RuntimeError:
        return torch.optim.Adam(weights, lr=lr)


@torch.no_grad()
def _forward(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """(probes, samples, width) → (probes, samples, classes)."""
    for layer in range(0, len(weights), 2):
        x = torch.baddbmm(weights[layer + 1], x, weights[layer])
        if layer < len(weights) - 2:
            x = x.relu()
    return x


class Order:
    """An endless stream of permutations, cut into batches; drawn where the key lies, as many epochs at once as are asked for."""

    def __init__(self, key: Tensor, size: int) -> None:
        self.key, self.size, self.epoch = key, size, 0
        self.left = torch.zeros(0, dtype=torch.int64, device=key.device)

    def next(self, count: int) -> Tensor:
        if len(self.left) < count:
            last = self.epoch + math.ceil((count - len(self.left)) / self.size)
            # keys are made on the host, so that they need no kernel each
            epochs = rng.keys(self.key.cpu(), each=range(self.epoch, last)).to(self.key.device)
            self.left = torch.cat([self.left, rng.shuffles(epochs, self.size).flatten()])
            self.epoch = last
        out, self.left = self.left[:count], self.left[count:]
        return out
