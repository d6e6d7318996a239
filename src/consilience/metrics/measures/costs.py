"""What a method costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..costs import client_memory, model_size, seconds, traffic
from ..registry import Measure, register
from ..subject import Subject


@register
@dataclass(frozen=True)
class Communication(Measure):
    """Parameters, and bytes up and down: in total, per round, and per client and round."""

    name = "communication"
    needs = ("records",)
    formula = "bytes of every tensor sent, as the run counted them"

    def measure(self, s: Subject) -> dict[str, Any]:
        return {**model_size(s.fed), **traffic(s.records)}


@register
@dataclass(frozen=True)
class Memory(Measure):
    """Bytes a client holds between rounds, by what they are, and in a round."""

    name = "memory"
    formula = "bytes of state; in a round: state + model + model received + optimiser + shared state"

    def measure(self, s: Subject) -> dict[str, Any]:
        return client_memory(s.fed)


@register
@dataclass(frozen=True)
class Seconds(Measure):
    """Wall-clock seconds of the rounds, scoring included, on the machine that ran them."""

    name = "seconds"
    needs = ("records",)
    formula = "sum, mean and median of the recorded seconds"

    def measure(self, s: Subject) -> dict[str, Any]:
        return seconds(s.records)
