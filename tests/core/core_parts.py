"""Small parts that exist for the tests of the core alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.engines import Sequential
from consilience.testing import tiny_population


@dataclass(frozen=True)
class Remember(Part):
    """Asks the core to keep every client's trained model."""

    name, previous = "remember", True


@dataclass(frozen=True)
class Break(Part):
    """Calls `action` in the hook named `at`; otherwise inert."""

    at: str = ""
    action: Any = field(default=None, compare=False)

    name = "break"
    reduce = {"x": "sum"}

    def _maybe(self, at: str) -> None:
        if self.at == at:
            self.action()

    def init_shared(self, spec: Any) -> Any:
        return {"x": torch.zeros(())}

    def init_server(self, spec: Any) -> Any:
        return {"y": torch.zeros(())}

    def init_kept(self, spec: Any) -> Any:
        return {"z": torch.zeros(())}

    def survey(self, c: Any) -> Any:
        self._maybe("survey")
        return {"x": torch.ones(())}

    def receive(self, c: Any) -> Any:
        self._maybe("receive")
        return c.received["params"], {}

    def loss(self, v: Any) -> Any:
        self._maybe("loss")
        return 0.0

    def finish(self, c: Any) -> Any:
        self._maybe("finish")
        return {"z": c.kept["z"] + 1}, {"x": torch.ones(())}

    def server(self, s: Any) -> Any:
        self._maybe("server " + s.stage)
        return {"x": s.shared["x"] + s.reduced["x"]}, {"y": s.server["y"] + 1}

    def aggregate(self, s: Any, change: Any) -> Any:
        self._maybe("aggregate")
        return change, {"y": s.server["y"] + 1}


@dataclass(frozen=True)
class Highest(Part):
    """Chooses the clients with the highest loss so far; those that never trained first, and among equals by their numbers."""

    on: bool = True

    name = "highest"
    reduce = {"loss": "stack"}

    def init_server(self, spec: Any) -> Any:
        return {"loss": torch.full((spec.population,), 1e9)}

    def choose(self, s: Any, drawn: list[int]) -> list[int]:
        loss = s.server["loss"].tolist()
        return sorted(s.ids, key=lambda i: -loss[i])[: len(drawn)] if self.on else drawn

    def finish(self, c: Any) -> Any:
        return c.kept, {"loss": c.losses.mean()}

    def server(self, s: Any) -> Any:
        return s.shared, {"loss": s.server["loss"].index_copy(0, torch.tensor(s.ids), s.reduced["loss"])}


class Plain(nn.Module):
    """No normalisation; `body` may hold anything."""

    def __init__(self, body: nn.Module | None = None, classes: int = 3, width: int = 64) -> None:
        super().__init__()
        self.body = body or nn.Flatten()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def federation(module: nn.Module, *parts: Part, population: Any = None, layout: Layout | None = None, **policy: Any) -> Federation:
    return Federation(module, layout or Layout(), Method(parts), population or tiny_population(), Policy(**({"batch": 8} | policy)),
                      Sequential)
