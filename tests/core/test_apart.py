"""The parts' own steps: the run's momentum, an optimiser to themselves, kept and reset like that of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from consilience import tree
from consilience.core import optimiser
from consilience.core.part import Part
from consilience.core.snapshot import restore, snapshot
from consilience.core.step import Program
from consilience.metrics.costs import client_memory
from consilience.parts import PARTS
from consilience.testing import ReplayedSequential, differences, run_tiny, tiny_federation, trial

APART = ("debias", "dann", "affine")                             # our parts that take steps of their own
ALONE: dict[str, Any] = {"sizes": (24,), "epochs": 1, "lr": 0.1, "momentum": 0.5}      # one client, three steps a round


@dataclass(frozen=True)
class Climb(Part):
    """Climbs ½a² with a number that it attaches and ½p² with a personal one; both begin at 1."""

    name = "climb"

    def build(self, module: Any, spec: Any) -> Any:
        module.add_module(self.name, nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            module.climb.weight.fill_(1.0)
        return module

    def init_personal(self, spec: Any) -> Any:
        return {"own": torch.ones(1)}

    def adversary(self, v: Any) -> Any:
        return -0.5 * (v.params["climb.weight"].square().sum() + v.personal["own"].square().sum())


def stood(fed: Any) -> tuple[float, float]:
    return float(fed.model["params"]["climb.weight"]), float(fed.client(0).tensors["personal"]["climb"]["own"])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_up_with_momentum_by_hand(steps: int) -> None:
    """SGD with momentum ρ on −½θ²: v ← ρv − θ, θ ← θ − ηv. From θ = 1 with ρ = 0.5 and η = 0.1:

    v₁ = −1                     θ₁ = 1.1
    v₂ = −0.5 − 1.1 = −1.6      θ₂ = 1.26
    v₃ = −0.8 − 1.26 = −2.06    θ₃ = 1.466
    Weight decay, which the model's own steps have here, would pull θ₁ below 1.1.
    """
    fed = run_tiny([Climb()], rounds=1, **(ALONE | {"epochs": 1, "steps": steps, "weight_decay": 0.5}))
    assert stood(fed) == pytest.approx(([1.1, 1.26, 1.466][steps - 1],) * 2, abs=1e-6)


@pytest.mark.parametrize(("state", "after"), [("reset", 2.149156), ("kept", 2.361336)])
def test_velocity_between_rounds_by_hand(state: str, after: float) -> None:
    """Three more steps from θ₃ = 1.466. From rest they multiply θ by 1.466 once more: 1.466² = 2.149156. With v₃ = −2.06 kept:

    v₄ = −1.03 − 1.466 = −2.496         θ₄ = 1.7156
    v₅ = −1.248 − 1.7156 = −2.9636      θ₅ = 2.01196
    v₆ = −1.4818 − 2.01196 = −3.49376   θ₆ = 2.361336
    """
    fed = run_tiny([Climb()], rounds=2, **(ALONE | {"optimiser_state": state}))
    assert stood(fed) == pytest.approx((after,) * 2, abs=1e-5)
    held = dict(tree.paths(fed.client(0).tensors["optimiser"]))
    assert {p for p in held if p.startswith("apart/")} == ({"apart/climb/m/climb.weight", "apart/climb/m/personal/own"} if held else set())
    assert bool(held) == (state == "kept")


def plainly(self: Program, part: Any, hook: str, view: Any) -> None:
    """An own step without momentum, written out."""
    own = [p for k, p in view.params.items() if k.startswith(part.name + ".")] + tree.leaves(view.personal)
    loss = getattr(part, hook)(view)
    if torch.is_tensor(loss):
        grads = torch.autograd.grad(loss, own, materialize_grads=True)
        with torch.no_grad():
            optimiser.descend(own, list(grads), view.lr)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize(("policy", "same"), [({"momentum": 0.0}, True), ({"momentum": 0.0, "optimiser_state": "kept"}, True),
                                              ({"momentum": 0.0, "optimiser": "adam"}, True), ({"momentum": 0.9}, False)], ids=str)
def test_without_momentum_a_step_is_plain_descent_bit_for_bit(name: str, policy: dict[str, Any], same: bool,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    ours = run_tiny([trial(PARTS[name])], **policy)
    monkeypatch.setattr(Program, "step_apart", plainly)
    assert (not differences(ours, run_tiny([trial(PARTS[name])], **policy))) == same


def parts() -> list[Part]:
    return [Climb(), *(trial(PARTS[name]) for name in APART)]


@pytest.mark.parametrize("state", ["reset", "kept"])
def test_recorded_steps_have_the_same_momentum(state: str) -> None:
    """A recorded step holds addresses: the velocity must lie where every client of a slot finds its own."""
    one = run_tiny(parts(), optimiser_state=state)
    assert not differences(one, run_tiny(parts(), optimiser_state=state, engine=ReplayedSequential))
    assert not differences(one, run_tiny(parts(), optimiser_state=state, order=(3, 1, 0, 2)))


def test_velocity_survives_a_checkpoint() -> None:
    whole = run_tiny(parts(), rounds=3, optimiser_state="kept")
    first = run_tiny(parts(), rounds=1, optimiser_state="kept")
    tensors, meta = snapshot(first)
    assert tensors["clients/0/optimiser/apart/debias/m/debias.0.weight"].abs().max() > 0
    second = tiny_federation(parts(), optimiser_state="kept")
    restore(second, tensors, meta)
    second.round()
    second.round()
    assert not differences(whole, second)


def test_velocity_counts_as_memory() -> None:
    """One float for each number of Climb: 4 bytes attached, 4 personal. Without momentum nothing."""
    held = lambda **how: client_memory(tiny_federation([Climb()], **how))["in_a_round_bytes"] - client_memory(
        tiny_federation(**how))["in_a_round_bytes"]
    assert held(momentum=0.9) - held(momentum=0.0) == 8
