"""The global test set as every client would see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import rng
from ...data import geometry, shifts
from ...errors import ConfigError
from ...options import option
from ..clients import client_mean, worst
from ..registry import Measure, register
from ..subject import Subject

STEP = 15.0                    # degrees between angles, where no shift says another step
PART = 4096                    # images rotated at a time


@register
@dataclass(frozen=True)
class ShiftedTest(Measure):
    """Accuracy of the global model on the global test set in each client's shift, or rotated by given angles: balanced classes."""

    name = "shifted_test"
    needs = ("classification",)
    formula = "mean over clients k of a(w; shift_k(test set)); FedBR's ten rotated copies of MNIST's test set"
    angles: int | tuple[float, ...] | None = option(None, "in place of the clients' shifts: one copy of the test set for each angle, in "
                                                          "degrees; a number: so many, from 0 by the shift's step, else by 15")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.angles == () or (isinstance(self.angles, int) and self.angles < 1):
            raise ConfigError(f"The 'angles' option of the measure 'shifted_test' needs at least one angle. Got {self.angles!r} instead.")

    def missing(self, s: Subject) -> str | None:
        if s.no_rows("global"):
            return "there is no global test set: set test=both or test=global"
        if self.angles is not None:
            shape = tuple(s.data.x.shape[1:])
            return s.no_model("global") if len(shape) == 3 else f"only images can be rotated, and the samples have shape {shape}"
        if not s.data.description.get("shift"):
            return "the clients' inputs are not shifted"
        if s.data.held_out:
            return "clients are held out, so that the numbers their shifts go by are not known"
        return s.no_model("global")

    def measure(self, s: Subject) -> dict[str, Any]:
        return self.by_client(s) if self.angles is None else self.by_angle(s, self.angles)

    def by_angle(self, s: Subject, angles: int | tuple[float, ...]) -> dict[str, Any]:
        if isinstance(angles, int):
            shift = s.data.description.get("shift")
            step = getattr(shifts.make(shift), "step", STEP) if shift else STEP
            angles = tuple(step * i for i in range(angles))
        x, y = s.data.x[s.data.test], s.data.y[s.data.test]
        each: dict[str, float] = {}
        for number, angle in enumerate(angles):
            turned = torch.cat([geometry.rotate(part, torch.tensor(float(angle))) for part in x.split(PART)])
            each[f"{angle:g}"] = _accuracy(s, turned, y)
            s.tell("rotated test sets", number + 1, len(angles))
        low = worst(each)
        return {"mean": client_mean(each), "worst": low[1] if low else None, "worst_angle": low[0] if low else None, "per_angle": each,
                "scored": f"the global model after aggregation, on the global test set rotated by {', '.join(each)} degrees"}

    def by_client(self, s: Subject) -> dict[str, Any]:
        shift = shifts.make(s.data.description["shift"])
        key = rng.key(s.data.description["seed"], "data", "shift")
        rows = s.data.test
        each: dict[str, float] = {}
        for number, name in enumerate(s.names):
            owned = [torch.arange(len(rows) if i == number else 0) for i in range(len(s.names))]
            moved = shift.apply(s.data.x[rows], owned, key)               # as `load` shifted the client's own rows
            each[name] = _accuracy(s, moved, s.data.y[rows])
            s.tell("shifted test sets", number + 1, len(s.names))
        low = worst(each)
        return {"mean": client_mean(each), "worst": low[1] if low else None, "worst_client": low[0] if low else None, "per_client": each,
                "scored": "the global model after aggregation, on the global test set in every client's shift"}


@torch.no_grad()
def _accuracy(s: Subject, x: Tensor, y: Tensor) -> float:
    fed, right = s.fed, 0
    state = fed.client(0)
    for part, labels in zip(x.split(fed.policy.eval_batch), y.split(fed.policy.eval_batch)):
        inputs, _ = s.data.transform(part.to(fed.device), labels.to(fed.device), None)
        right += int((fed.look(0, state, fed.model, inputs, False, False).logits.argmax(1).cpu() == labels).sum())
    return right / len(y)
