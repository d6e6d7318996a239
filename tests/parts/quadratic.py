"""A federation small enough for pencil and paper.

The model is one vector w. Client i holds copies of one target a_i, and its loss is ½‖w − a_i‖², so that the gradient is
w − a_i whatever batch is drawn. With batch 1 and k samples a client makes k steps an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.step_view import StepView
from consilience.data.federated import as_float
from consilience.engines import Sequential

W = "head.weight"


class Vector(nn.Module):
    """Its logits are its weights."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.head = nn.Linear(1, len(start), bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(start)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.new_ones(len(x), 1))


@dataclass(frozen=True)
class Quadratic(Part):
    """½ mean_b ‖w − x_b‖² in place of the task's loss."""

    name = "quadratic"

    def main_loss(self, v: StepView) -> Tensor:
        return 0.5 * (v.trace.logits - v.batch.x).square().sum(1).mean()


def vectors(parts: Iterable[Part], targets: Sequence[Sequence[float]], sizes: Sequence[int], start: Sequence[float] = (0.0,),
            **policy: Any) -> Federation:
    """Client i has sizes[i] samples, all equal to targets[i]."""
    x = torch.cat([torch.tensor([t]).expand(n, -1) for t, n in zip(targets, sizes)])
    rows = tuple(torch.arange(len(x)).split(list(sizes)))
    population = Population(x, torch.zeros(len(x), dtype=torch.int64), rows, len(start), as_float)
    settings = {"lr": 0.1, "batch": 1, "weights": "uniform"} | policy
    return Federation(Vector(start), Layout(), Method([Quadratic(), *parts]), population, Policy(**settings), Sequential)


def scalars(parts: Iterable[Part], targets: Sequence[float], sizes: Sequence[int], start: float = 0.0, **policy: Any) -> Federation:
    """The same with w a number."""
    return vectors(parts, [(t,) for t in targets], sizes, (start,), **policy)


def weight(fed: Federation) -> float:
    return fed.model["params"][W].item()


def walk(w: float, target: float, steps: int, lr: float, momentum: float = 0.0,
         correct: Callable[[float, float], float] = lambda g, w: g) -> float:
    """SGD as a loop over numbers: m ← ρm + g', w ← w − ηm, with g' = correct(w − a, w)."""
    m = 0.0
    for _ in range(steps):
        m = momentum * m + correct(w - target, w)
        w = w - lr * m
    return w


def path(steps: int, lr: float, momentum: float) -> float:
    """How far a gradient of 1 in every step carries: the sum of the momentum buffers times η."""
    m = total = 0.0
    for _ in range(steps):
        m = momentum * m + 1
        total += lr * m
    return total
