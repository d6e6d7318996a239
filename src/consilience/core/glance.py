"""A step that trains nothing: what a forward pass outside training may read."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import rng, tree
from ..tree import Tree
from .part import Model, Part

if TYPE_CHECKING:
    from .client import ClientState
    from .federation import Federation


def _number(name: str) -> Any:
    return property(lambda glance: glance._numbers[name])


class Glance:
    """Stands for a step and its slot in one. Numbers and keys are made only when a tap or a dropout layer asks: most passes
    need none, and on a GPU making them takes longer than the pass.
    """

    batch = None

    def __init__(self, fed: Federation, number: int, state: ClientState, model: Model) -> None:
        self._scalars = lambda: fed.scalars(number, state)
        self._device = fed.device
        self.program, self.phase = fed.program, fed.phases[0]
        self.hooks = fed.program.hooks[self.phase.name]
        self.memo: dict[Any, Any] = {}
        self.slot = self
        self.shared, self.received = fed.shared, model
        self.scratch: Tree = {}
        homes = state.tensors
        self.kept, self.personal, self.previous = homes["kept"], homes["personal"], homes["previous"]

    def settle(self) -> None:
        """No weight is behind where none is trained."""

    @cached_property
    def _numbers(self) -> dict[str, Tensor]:
        return tree.to(self._scalars(), self._device)

    lr, round, first, client = _number("lr"), _number("round"), _number("first"), _number("client")

    @cached_property
    def key(self) -> Tensor:
        return rng.fold(self._numbers["key"], 0)

    def planned(self, part: Part) -> Tree:
        return {}

    def recalled(self, model: Model, x: Tensor) -> None:
        """Nothing was asked before."""
