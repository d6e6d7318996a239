"""Classes a client has and lacks, along its local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import rng
from ..registry import register
from ..subject import Subject
from .local import _Path


@register
@dataclass(frozen=True)
class ClassPath(_Path):
    """Accuracy on the classes a client has, and on those it lacks, along its local training (LfD's Fig. 4)."""

    name = "class_path"
    formula = "share of right answers among the samples of classes in, and not in, the client's training samples"

    def measure(self, s: Subject) -> dict[str, Any]:
        owner, path = self.path(s, "logits")
        every = s.everything(self.chosen(s))
        drawn = every[rng.permutation(s.key("path", self.chosen(s)), len(every))[: self.samples]]      # those `local_path` looks at
        y = s.data.y[drawn].cpu()
        has = torch.isin(y, torch.tensor(sorted(s.present(owner))))

        def right(logits: Tensor, which: Tensor) -> float | None:
            return float((logits.argmax(1)[which] == y[which]).double().mean()) if bool(which.any()) else None

        trace = {"step": [step for step, _, _ in path], "present": [right(logits, has) for _, logits, _ in path],
                 "absent": [right(logits, ~has) for _, logits, _ in path]}
        ends = {group: {"received": trace[group][0], "last": trace[group][-1]} for group in ("present", "absent")}
        return {**ends, "trace": trace, **self.about(s, owner)}
