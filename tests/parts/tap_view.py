"""What a tap or a relabelling reads, without a step around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from consilience.core.layout import Layout
from consilience.core.part import Batch


def view_of(plan: dict[str, Tensor], y: Tensor | None = None, classes: int = 3, train: bool = True,
            stages: tuple[str, ...] = ("q",)) -> Any:
    """A view in a training step with this plan; the model's stages have these names."""
    y = torch.zeros(2, dtype=torch.int64) if y is None else y
    return SimpleNamespace(train=train, plan=plan, once=lambda label, compute: compute(), batch=Batch(torch.zeros(len(y), 1), y, y),
                           spec=SimpleNamespace(layout=Layout(stages=stages), classes=classes))
