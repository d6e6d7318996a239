"""The gradient of a step, in float32 and, where weights were cast to bfloat16, as it came."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.sgd import Move
from ..layers.bfloat16 import Arrived, widened
from ..tree import Flat


class Gradients(NamedTuple):
    """By key: what came in float32 or None, and what came for its cast weights, once for every pass that used them."""

    wide: dict[str, Tensor | None]
    narrow: dict[str, list[Arrived]]

    @classmethod
    def of(cls, params: Flat, wide: dict[str, Tensor | None], arrived: list[Arrived]) -> Gradients:
        names = {id(params[k]): k for k in wide}
        narrow: dict[str, list[Arrived]] = {}
        for a in arrived:
            narrow.setdefault(names[id(a.weight)], []).append(a)
        return cls(wide, narrow)

    def in_float32(self, params: Flat) -> Flat:
        """Summed; zeros where nothing came."""
        parts = iter(widened([a for k in self.wide for a in self.narrow.get(k, [])]))
        out = {}
        for k, whole in self.wide.items():
            for _ in self.narrow.get(k, []):
                whole = next(parts) if whole is None else whole + next(parts)
            out[k] = torch.zeros_like(params[k]) if whole is None else whole
        return out

    def moves(self, params: Flat, momenta: Flat, add: Flat, target: Flat) -> list[Move]:
        """What each parameter descends by. Those with one gradient in bfloat16 and no other take it as it is."""
        single = {k: came[0] for k, came in self.narrow.items() if len(came) == 1 and self.wide[k] is None}
        rest = Gradients({k: g for k, g in self.wide.items() if k not in single}, self.narrow).in_float32(params)
        return ([Move(params[k], momenta.get(k), a.grad, a.cast, a.reach, add.get(k), target.get(k)) for k, a in single.items()]
                + [Move(params[k], momenta.get(k), g, None, None, add.get(k), target.get(k)) for k, g in rest.items()])
