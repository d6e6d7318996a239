"""The global test set as every client would see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import rng
from ...data import shifts
from ..clients import client_mean, worst
from ..registry import Measure, register
from ..subject import Subject


@register
@dataclass(frozen=True)
class ShiftedTest(Measure):
    """Accuracy of the global model on the global test set in each client's shift: balanced classes, the clients' own inputs."""

    name = "shifted_test"
    needs = ("classification",)
    formula = "mean over clients k of a(w; shift_k(test set)); FedBR's ten rotated copies of MNIST's test set"

    def missing(self, s: Subject) -> str | None:
        if s.no_rows("global"):
            return "there is no global test set: set test=both or test=global"
        if not s.data.description.get("shift"):
            return "the clients' inputs are not shifted"
        if s.data.held_out:
            return "clients are held out, so that the numbers their shifts go by are not known"
        return s.no_model("global")

    def measure(self, s: Subject) -> dict[str, Any]:
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
