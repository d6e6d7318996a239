"""Corrections that parts declare: by hand on a parabola, beside other hooks, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quadratic import W, scalars, weight

from consilience import Correction, tree
from consilience.core import correction
from consilience.core.part import Part
from consilience.errors import ConfigError
from consilience.parts.per import Per
from consilience.testing import run_tiny, tiny_federation


@dataclass(frozen=True)
class Steady(Part):
    """0.5 added, and a pull of 2 to 0.25."""

    name = "steady"

    def correction(self, v: Any) -> Correction:
        return Correction({W: torch.full_like(v.received["params"][W], 0.5)}, 2, {W: torch.full_like(v.received["params"][W], 0.25)})


@dataclass(frozen=True)
class Everywhere(Steady):
    """The same beside a loss of w and a hook that doubles the gradient."""

    name = "everywhere"

    def loss(self, v: Any) -> Any:
        return v.params[W].sum()

    def grad(self, v: Any, g: Any) -> Any:
        return tree.scale(g, 2.0)


@pytest.mark.parametrize("device", ["cuda", "cpu"])          # where pulls go past autograd: elsewhere, and here
@pytest.mark.parametrize(("part", "step", "losses"), [
    # a = 1, w⁰ = 0, η = 0.1. First g = (0 − 1) + 0.5 + 2·(0 − 0.25) = −1 and w = 0.1; then g = −0.9 + 0.5 − 0.3 = −0.7 and w = 0.17.
    # losses: ½·1 + 0.25² = 0.5625 and ½·0.81 + 0.15² = 0.4275
    (Steady(), 0.17, (0.5625, 0.4275)),
    # the loss of w is one more in the gradient, and all of it is doubled: first g = 2·(−1 + 1) = 0, and again
    (Everywhere(), 0.0, (0.5625, 0.5625))], ids=lambda x: getattr(x, "name", ""))
def test_two_steps_by_hand(monkeypatch: pytest.MonkeyPatch, device: str, part: Part, step: float, losses: tuple[float, float]) -> None:
    monkeypatch.setattr(correction, "DEVICE", device)
    fed = scalars([part], [1.0], [2])
    assert fed.round().losses[0] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert weight(fed) == pytest.approx(step, abs=1e-6)


@dataclass(frozen=True)
class Whole(Part):
    """Pulls and pushes all parameters, whether they train or not."""

    name = "whole"

    def phases(self, phases: Any, spec: Any) -> Any:
        return [type(p)(p.name, tuple(k for k in p.keys if not k.startswith("head.")), p.model, p.epochs) for p in phases]

    def correction(self, v: Any) -> Correction:
        all_of_them = v.received["params"]
        return Correction(all_of_them, 1.0, tree.map(lambda t: t + 1, all_of_them))


def test_what_the_phase_does_not_train_stays_and_is_not_in_the_loss() -> None:
    """In the first step w is 1 away from its target everywhere, which is half of the number of parameters that train."""
    fed = tiny_federation([Whole()], steps=1, batch=8)
    start = tree.clone(fed.model["params"])
    plain = tiny_federation(steps=1, batch=8).round().losses[0]
    trains = sum(t.numel() for k, t in start.items() if not k.startswith("head."))
    assert fed.round().losses[0] == pytest.approx(plain + 0.5 * trains, rel=1e-6)
    changed = {k.partition(".")[0] for k, t in fed.model["params"].items() if not torch.equal(t, start[k])}
    assert changed == {"stage1", "neck", "header"}


ANYTHING = r"The hook 'correction' of part 'wrong' must return a Correction\(add, strength, target\)\. "


@pytest.mark.parametrize(("given", "said"), [
    (None, ANYTHING + r"Got NoneType instead\. Is a return missing\?"), ({}, ANYTHING + "Got dict instead"),
    (Correction(strength=torch.ones(())), "The strength in the correction of part 'wrong' must be a number. Got Tensor instead"),     # type: ignore[arg-type]
    (Correction(target=None), r"The target in the correction of part 'wrong' must be a tree by parameter, as v\.received\['params'\] is\. "     # type: ignore[arg-type]
                              "Got NoneType instead"),
    # a whole model, or a whole scratch, in place of its parameters: no name in it is a parameter's, and nothing would be added
    (Correction(strength=1.0, target={"params": {}, "buffers": {}}), "The target in the correction of part 'wrong' has 'params', which is "
                                                                     "no parameter of the model"),
    (Correction({"head.bais": torch.ones(3)}), r"The add in the correction of part 'wrong' has 'head\.bais', which is no parameter"),
    (Correction({"head.bias": torch.ones(())}), r"must have a tensor of shape \(3,\) for 'head\.bias'\. Got shape \(\) instead"),
    (Correction({"head.bias": 1.0}), "Got float instead")])     # type: ignore[dict-item]
def test_anything_else_is_refused(given: Any, said: str) -> None:
    @dataclass(frozen=True)
    class Wrong(Part):
        name = "wrong"

        def correction(self, v: Any) -> Any:
            return given
    with pytest.raises(ConfigError, match=said):
        run_tiny([Wrong(), Per()], rounds=1)
