"""Passes that parts ask for with and without gradients are not taken for each other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from core_parts import Plain, federation, seeded
from torch import Tensor

from consilience.core.part import Part
from consilience.core.step_view import StepView


@dataclass(frozen=True)
class Look(Part):
    """Looks at the model without gradients, before others ask."""

    name = "look"
    seen: Any = field(default_factory=list, compare=False)

    def track(self, v: StepView) -> Any:
        with torch.no_grad():
            self.seen.append(v.forward(v.model, v.batch.x).logits)
        return {}

    def init_scratch(self, c: Any) -> Any:
        return {}


@dataclass(frozen=True)
class Ask(Part):
    """A term over a pass of `model`, with gradients or without, and twice."""

    name = "ask"
    model: Any = field(default=lambda v: v.model, compare=False)
    learning: bool = True
    asked_beside: bool = False
    seen: Any = field(default_factory=list, compare=False)

    def init_shared(self, spec: Any) -> Any:
        return {"x": torch.ones(3, *spec.sample)}

    def beside(self, v: StepView) -> Tensor | None:
        return v.shared["x"] if self.asked_beside else None

    def loss(self, v: StepView) -> Tensor:
        x = v.shared["x"] if self.asked_beside else v.batch.x
        with nullcontext() if self.learning else torch.no_grad():
            one, other = (v.forward(self.model(v), x, train=self.asked_beside).logits for _ in range(2))
        assert one is other                                          # computed once
        self.seen.append(one)
        return one.square().mean()


def test_a_pass_without_gradients_is_not_handed_to_who_needs_them() -> None:
    look, ask = Look(), Ask()
    federation(seeded(Plain), look, ask, epochs=1, steps=1).round([0])
    assert not look.seen[0].requires_grad
    assert ask.seen[0].requires_grad
    torch.testing.assert_close(look.seen[0], ask.seen[0].detach())


def test_frozen_models_are_passed_once_whoever_asks() -> None:
    """Their passes never have gradients, so the mode makes no difference to them."""
    frozen, plain = Ask(model=lambda v: v.received), Ask(model=lambda v: v.received, learning=False)

    @dataclass(frozen=True)
    class Other(Ask):
        name = "other"

    federation(seeded(Plain), frozen, Other(model=lambda v: v.received, learning=False, seen=plain.seen), epochs=1, steps=1).round([0])
    assert frozen.seen[0] is plain.seen[0]
    assert not frozen.seen[0].requires_grad


@pytest.mark.parametrize("learning", [True, False])
def test_what_went_beside_the_batch_has_gradients_for_who_wants_them(learning: bool) -> None:
    ask = Ask(asked_beside=True, learning=learning)
    fed = federation(seeded(Plain), ask, epochs=1, steps=1)
    assert fed.program.hooks["main"]["beside"] == [ask]
    fed.round([0])
    assert ask.seen[0].requires_grad is learning


@dataclass(frozen=True)
class Sensitivity(Part):
    """Uploads the gradient of a client's squared logits, as methods do that weigh parameters by what depends on them."""

    name = "sensitivity"
    reduce = {"gradient": "sum"}
    seen: Any = field(default_factory=list, compare=False)

    def finish(self, c: Any) -> Any:
        params = {k: w.detach().clone().requires_grad_() for k, w in c.model["params"].items()}
        x, _ = next(iter(c.batches()))
        with torch.enable_grad():
            assert not c.forward({**c.model, "params": params}, x).logits.requires_grad
            objective = c.forward({**c.model, "params": params}, x, learn=True).logits.square().sum()
            gradient = dict(zip(params, torch.autograd.grad(objective, list(params.values()))))
        self.seen.append((x, params, gradient))
        return c.kept, {"gradient": gradient}


def test_a_client_has_gradients_of_a_whole_pass_where_it_says_so() -> None:
    part = Sensitivity()
    federation(seeded(Plain), part, epochs=1, steps=1).round([0])
    (x, params, gradient), = part.seen
    objective = torch.func.functional_call(seeded(Plain).eval(), params, (x,)).square().sum()
    for found, expected in zip(gradient.values(), torch.autograd.grad(objective, list(params.values()))):
        torch.testing.assert_close(found, expected)
