"""The samples a federation trains on, as tensors and rows; made from any data set by the layer above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .task import Task, task_named


@dataclass(frozen=True)
class Population:
    """All samples, and the training rows of each client. Clients are numbered from 0; keys are drawn from the numbers."""

    x: Tensor
    y: Tensor
    rows: tuple[Tensor, ...]
    classes: int
    transform: Callable[..., Any]                  # (x, y, key or None) -> (x, y); see consilience.data.Transform
    names: tuple[str, ...] = ()
    proxy: Tensor | None = None                    # public samples that belong to no client
    task: Task = field(default_factory=lambda: task_named("classification"))
