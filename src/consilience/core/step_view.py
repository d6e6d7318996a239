"""What a part may read during a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .. import rng
from ..tree import Flat, Tree
from .network import Trace
from .part import Batch, Model, Part, Spec

if TYPE_CHECKING:
    from .step import Pass


def _own(home: str) -> Any:
    return property(lambda v: getattr(v._pass.step.slot, home).get(v._part.name, {}))


def _slot(name: str) -> Any:
    return property(lambda v: getattr(v._pass.step.slot, name))


class Unfolded(NamedTuple):
    """What a key is made of: fold(fold(base, counter), number), or fold(base, number) without a counter."""

    base: Tensor
    counter: Tensor | None
    number: int


class StepView:
    """What a part may read during a step. Nothing in it may be written."""

    __slots__ = ("_label", "_part", "_pass", "_so_far")

    def __init__(self, pass_: Pass, part: Part, label: str = "batch") -> None:
        self._pass, self._part, self._label = pass_, part, label
        self._so_far: Trace | None = None             # in a tap

    shared, kept = _own("shared"), _own("kept")
    received, previous = _slot("received"), _slot("previous")      # models, frozen for the round
    lr, round, first, client = _slot("lr"), _slot("round"), _slot("first"), _slot("client")      # 0-d tensors

    @property
    def model(self) -> Model:
        """The model in training, at this pass's point in parameter space."""
        self._pass.step.slot.settle()
        return self._pass.model

    @property
    def personal(self) -> Tree:
        """The part's own tensors of the client; a model among them may be the one in training."""
        step = self._pass.step
        if step.phase.model != "model":
            step.slot.settle()
        return step.slot.personal.get(self._part.name, {})

    @property
    def params(self) -> Flat:
        return self.model["params"]

    @property
    def spec(self) -> Spec:
        return self._pass.step.program.spec

    @property
    def travelling(self) -> tuple[str, ...]:
        """Keys that this phase trains and that travel."""
        return self._pass.step.program.travelling[self._pass.step.phase.name]

    @property
    def scratch(self) -> Tree:
        return self._pass.scratch.get(self._part.name, {})

    @property
    def batch(self) -> Batch:
        return self._pass.batch

    @property
    def trace(self) -> Trace:
        """Of the main pass; in a tap, of the pass that it acts in, as far as that has come."""
        trace = self._so_far or self._pass.trace
        assert trace is not None
        return trace

    @property
    def features(self) -> Tensor:
        """What entered the head in this pass, before any tap."""
        return self.trace.before[self.spec.features]

    @property
    def notes(self) -> dict[str, Any]:
        """point -> what this part's tap noted there."""
        return self.trace.notes.get(self._part.name, {})

    @property
    def plan(self) -> Tree:
        return self._pass.step.planned(self._part)

    @property
    def train(self) -> bool:
        return self._pass.train

    @property
    def plain(self) -> bool:
        """Whether the step is one of plain training (`c.train`), where `batch` and `main_loss` alone act."""
        return self._pass.step.phase.model == "plain"

    def task_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self._pass.step.program.task.loss(logits, target)

    def key(self, *words: str | int) -> Tensor:
        """A key for this step, pass, part and words."""
        return rng.key(self._pass.step.key, self._label, self._part.name, *words)

    def unfolded(self, *words: str | int) -> Unfolded:
        """`key`, for kernels that make it for themselves."""
        step, number = self._pass.step, rng.number(self._label, self._part.name, *words)
        counter = getattr(step.slot, "counter", None)
        return Unfolded(step.key if counter is None else step.slot.key, counter, number)

    def forward(self, model: Model, x: Tensor, train: bool = False, taps: bool = False, label: str = "batch", learn: bool = False) -> Trace:
        """One pass of `model`. Gradients flow only through v.model, or through a part's own model that is to `learn`; equal calls in a
        step are computed once. No buffer is written to: trace.buffers has those of the model as the pass left them.
        """
        return self._pass.forward(model, x, train, taps, label, learn)

    def once(self, label: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, computed once in this pass however many hooks ask."""
        memo, key = self._pass.memo, (self._part.name, label)
        if key not in memo:
            memo[key] = compute()
        return memo[key]

    def apply(self, name: str, x: Tensor, model: Model | None = None) -> Tensor:
        """One submodule (an attached module, the head) of v.model or of the model given."""
        return self._pass.step.program.network.apply(model or self.model, name, x, self.train)
