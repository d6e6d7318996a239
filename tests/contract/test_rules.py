"""The rules of the core that parts rely on, each in the smallest case that shows it broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from consilience import rng, tree
from consilience.core import federation
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.network import Network
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError
from consilience.parts import PARTS, parse_stack
from consilience.testing import (
    LAYOUT,
    ReplayedSequential,
    TinyNet,
    differences,
    run_tiny,
    tiny_federation,
    tiny_net,
    tiny_population,
)


def part(name: str, **settings: Any) -> Any:
    return PARTS[name](**({**PARTS[name].trial} | settings))


# ---- forward passes ------------------------------------------------------------------------------------------------

def test_building_leaves_no_statistics_of_the_probe() -> None:
    """The initial model is the module as it was given, running statistics and counters included."""
    given = tiny_net().state_dict()
    fed = tiny_federation([part("moon"), part("ffa")])
    for k, v in {**fed.model["params"], **fed.model["buffers"]}.items():
        assert torch.equal(v, given[k]), k
    assert int(fed.model["buffers"]["stage1.1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("names", [(), ("moon",), ("drift",), ("debias",), ("sam",), ("moon", "sam", "debias", "ntd")], ids=str)
def test_each_batch_is_counted_once(names: tuple[str, ...]) -> None:
    """Reference forwards, pseudo-data and SAM's second pass move no counter: client 3 makes 10 steps a round."""
    fed = run_tiny([part(n) for n in names], rounds=2)
    assert int(fed.model["buffers"]["stage1.1.num_batches_tracked"]) == 20


def test_reference_forwards_use_the_references_own_statistics() -> None:
    """A model is parameters and buffers: evaluating with other running statistics gives other logits, and back again."""
    fed = run_tiny(rounds=1)
    x, network = fed.samples.x[:6], fed.program.network
    first = network.forward(fed.model, x).logits
    other = {"params": fed.model["params"], "buffers": tree.clone(fed.spec.model["buffers"])}
    assert not torch.equal(first, network.forward(other, x).logits)
    assert torch.equal(first, network.forward(fed.model, x).logits)


def test_only_the_main_pass_writes_buffers() -> None:
    fed = tiny_federation()
    before = tree.clone(fed.model)
    fed.program.network.forward(fed.model, fed.samples.x[:6], train=True)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(fed.model)))
    fed.program.network.forward(fed.model, fed.samples.x[:6], train=True, update_buffers=True)
    assert int(fed.model["buffers"]["stage1.1.num_batches_tracked"]) == 1


# ---- equal forwards are computed once ------------------------------------------------------------------------------

@pytest.mark.parametrize(("names", "passes", "recalling"), [
    ((), 1, 1), (("moon",), 3, 1), (("drift",), 3, 1), (("moon", "drift", "ntd", "constraint"), 3, 1),        # main, received, previous
    (("debias",), 2, 2),                    # main, and one over the pseudo-data for max and min step; z_g is cached for the round
    (("sam",), 2, 2), (("sam", "moon"), 4, 2)])   # two main passes; frozen models' passes are shared by both
@pytest.mark.parametrize("recalls", [False, True])
def test_forwards_of_a_step(names: tuple[str, ...], passes: int, recalling: int, recalls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps, frozen models are asked only where samples may change from step to step; else when the client begins its round."""
    if recalls:
        passes = recalling
    else:
        monkeypatch.setattr(federation, "recalled_models", lambda fed: ())
    count: Counter[str] = Counter()
    real, step = Network.forward, Sequential.steps

    def forward(self: Network, *args: Any, **kwargs: Any) -> Any:
        count["forward"] += 1
        return real(self, *args, **kwargs)

    def steps(self: Sequential, slot: Any, phase: Any, sizes: list[int]) -> None:
        count["forward"] = 0
        step(self, slot, phase, sizes)
        assert count["forward"] == passes * len(sizes)
        count["rounds"] += 1
    monkeypatch.setattr(Network, "forward", forward)
    monkeypatch.setattr(Sequential, "steps", steps)
    run_tiny([part(n) for n in names])
    assert count["rounds"] == 6


# ---- ownership and unused parameters -------------------------------------------------------------------------------

def test_received_model_stands_still_while_the_client_trains() -> None:
    """Were it the slot's own memory, the proximal distance would be exactly 0."""
    weak, strong = run_tiny([part("prox", mu=0.0)], rounds=1), run_tiny([part("prox", mu=5.0)], rounds=1)
    start = tiny_federation().model["params"]
    walked = [float(torch.as_tensor(tree.sq_dist(f.model["params"], start))) for f in (weak, strong)]
    assert walked[1] < 0.5 * walked[0]


class WithSpare(TinyNet):
    """A parameter that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


def test_unused_parameters_get_zero_gradients() -> None:
    fed = Federation(WithSpare(), LAYOUT, Method([part("scaffold"), part("sam")]), tiny_population(), Policy(batch=8), Sequential)
    fed.round()
    assert torch.equal(fed.model["params"]["spare"], torch.ones(3))


# ---- taps ----------------------------------------------------------------------------------------------------------

def test_only_asked_points_are_listened_to() -> None:
    def listeners(*names: str) -> set[str]:
        module = tiny_federation([part(n) for n in names]).program.network.module
        return {name for name, m in module.named_modules() if m._forward_hooks or m._forward_pre_hooks}
    assert listeners() == {"head"}
    assert listeners("prox", "scaffold") == {"head"}
    assert listeners("ffa") == {"head", "stage1"}


class Twice(TinyNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.header(self.header(self.neck(self.stage1(x)))))


class Never(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(2, 2)


def test_a_point_must_fire_exactly_once() -> None:
    def build(net: nn.Module, at: str) -> None:
        Federation(net, LAYOUT, Method([part("prbm", at=at)]), tiny_population(), Policy(batch=8), Sequential)
    with pytest.raises(ConfigError, match="passed twice"):
        build(Twice(), "header")
    with pytest.raises(ConfigError, match="never fire"):
        build(Never(), "aside")
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        build(TinyNet(), "nowhere")


@dataclass(frozen=True)
class Looker(Part):
    """Looks at the batch a second time, with taps, under another label."""

    name = "looker"

    def points(self, layout: Layout) -> tuple[str, ...]:
        return ("stage1",)

    def loss(self, v: Any) -> Any:
        again = v.forward(v.model, v.batch.x, train=True, taps=True, label="again")
        return 0.0 * again.logits.sum() + (again.after["stage1"] - v.trace.after["stage1"]).abs().amax().clamp(max=1.0).detach()


def test_two_passes_do_not_share_noise() -> None:
    """With FFA always on, the same batch in a second pass is jittered by other draws: the difference is never 0."""
    fed = tiny_federation([part("ffa"), Looker()])
    plain = tiny_federation([part("ffa")])
    extra = fed.round().losses[0] - plain.round().losses[0]
    assert extra > 0.1
    alone = tiny_federation([Looker()])
    assert alone.round().losses[0] == pytest.approx(tiny_federation().round().losses[0])


# ---- adversaries ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Twist(Part):
    """Attaches one number, which its own step moves by −lr·slope, before or after the forward pass; a tap adds it to the features."""

    moment: str = "before"
    name = "twist"

    def build(self, module: Any, spec: Any) -> Any:
        module.add_module("twist", nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            module.twist.weight.zero_()
        return module

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.features,)

    def tap(self, v: Any, point: str, x: Any) -> Any:
        return x + v.params["twist.weight"].detach().sum()

    def _objective(self, v: Any) -> Any:
        return 10 * v.params["twist.weight"].sum()

    def before(self, v: Any) -> Any:
        return self._objective(v) if self.moment == "before" else 0.0

    def adversary(self, v: Any) -> Any:
        return self._objective(v) if self.moment == "after" else 0.0


@pytest.mark.parametrize(("moment", "seen"), [("before", [-0.5, -1.0, -1.5]), ("after", [0.0, -0.5, -1.0])])
@pytest.mark.parametrize("second", [(), ("sam",)], ids=str)
def test_adversaries_step_once_before_or_after_the_forward(moment: str, seen: list[float], second: tuple[str, ...],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """lr 0.05, slope 10 and no momentum: −0.5 a step. Stepping before, the first forward already sees −0.5; after, it sees 0. SAM's
    second pass does not step again.
    """
    shifts: list[float] = []

    def steps(self: Sequential, slot: Any, phase: Any, sizes: list[int]) -> None:
        for size in sizes:
            step = self.program.step(slot, phase, size)
            trace = step.first.trace
            shifts.append(float((trace.after["head:input"] - trace.before["head:input"]).detach().mean()))
    monkeypatch.setattr(Sequential, "steps", steps)
    run_tiny([Twist(moment=moment), *(part(n) for n in second)], rounds=1, sizes=(24,), epochs=1, momentum=0.0)
    assert shifts == pytest.approx(seen, abs=1e-5)


# ---- randomness, scalars, names ------------------------------------------------------------------------------------

def test_initial_values_depend_on_the_parts_own_name() -> None:
    alone, both = tiny_federation([part("debias")]), tiny_federation([part("dann"), part("debias"), part("moon")])
    other = tiny_federation([part("debias"), part("cosine")])
    for fed in (both, other):
        for k, p in alone.model["params"].items():
            if k.startswith("debias."):
                assert torch.equal(p, fed.model["params"][k]), k
    seeded = tiny_federation([part("debias")], seed=1)
    assert not torch.equal(alone.model["params"]["debias.0.weight"], seeded.model["params"]["debias.0.weight"])


def test_learning_rate_lives_on_the_device() -> None:
    """A recorded step keeps the addresses of numbers, not their values: a schedule over rounds must reach it."""
    how: dict[str, Any] = {"schedule": "exponential(gamma=0.5)", "rounds": 3}
    assert differences(run_tiny(rounds=3), run_tiny(**how))              # the schedule does something
    assert not differences(run_tiny(rounds=1), run_tiny(**(how | {"rounds": 1})))
    for parts in ([], [part("debias")], [part("prbm")]):
        assert not differences(run_tiny(parts, **how), run_tiny(parts, engine=ReplayedSequential, **how))


def test_draws_belong_to_client_round_and_step() -> None:
    fed = tiny_federation([part("ffa")])
    keys = set()
    for number in (0, 1, 3):
        for round_number in (1, 2):
            fed.round_number = round_number
            base = fed.scalars(number, fed.client(number))["key"]
            keys |= {int(rng.fold(base, step)) for step in range(6)}
    assert len(keys) == 3 * 2 * 6


def test_presets_forward_their_options() -> None:
    parts = {p.name: p for p in parse_stack("scaffold+dbe", {"dbe.kappa": 5, "dbe.at": "neck"}).parts}
    assert set(parts) == {"scaffold", "prbm", "mr"}
    assert parts["mr"].kappa == 5.0                       # type: ignore[attr-defined]
    assert parts["mr"].momentum == PARTS["mr"]().momentum  # type: ignore[attr-defined]
    assert (parts["mr"].at, parts["prbm"].at) == ("neck", "neck")     # type: ignore[attr-defined]


# ---- policies and declared state -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["cm", "nova", "scaffold"])
def test_path_lengths_need_an_optimiser_that_starts_anew(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} divides by the length"):
        tiny_federation([part(name)], optimiser_state="kept")
    with pytest.raises(ConfigError, match="Adam"):
        tiny_federation([part(name)], optimiser="adam", momentum=0.0)
    tiny_federation([part(name)], optimiser_state="kept", momentum=0.0)


@pytest.mark.parametrize(("how", "reason"), [({}, None), ({"batchnorm": "params"}, "statistics stay on the clients"),
                                             ({"batchnorm": "local"}, "statistics stay on the clients")])
def test_a_global_model_without_statistics_is_not_scored(how: dict[str, Any], reason: str | None) -> None:
    said = tiny_federation(**how).no_global_model
    assert said is None if reason is None else reason in str(said)


@dataclass(frozen=True)
class Wanting(Part):
    name = "wanting"
    prefers = {"weights": "samples"}


def test_parts_that_prefer_different_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefer different weights"):
        tiny_federation([Wanting(), part("scaffold")], weights="auto")
    assert tiny_federation([Wanting(), part("scaffold")], weights="uniform").policy.weights == "uniform"


@dataclass(frozen=True)
class Smuggler(Part):
    name = "smuggler"
    reduce = {"one": "sum"}

    def finish(self, c: Any) -> Any:
        return {}, {"one": torch.ones(2)}

    def server(self, s: Any) -> Any:
        return {"surprise": s.reduced["one"]}, {}


@dataclass(frozen=True)
class Undeclared(Part):
    name = "undeclared"

    def finish(self, c: Any) -> Any:
        return {}, {"one": torch.ones(2)}


def test_state_and_uploads_must_be_declared() -> None:
    with pytest.raises(ConfigError, match="'init_shared' declares: 'surprise' is none of them"):
        run_tiny([Smuggler()], rounds=1)
    with pytest.raises(ConfigError, match="declares no reduction"):
        run_tiny([Undeclared()], rounds=1)


def test_optimiser_state_is_kept_or_reset_as_the_policy_says() -> None:
    """Momentum of round one changes round two when it is kept; a reset client starts from rest."""
    reset, kept = run_tiny(rounds=2), run_tiny(rounds=2, optimiser_state="kept")
    assert differences(reset, kept, only=lambda k: k.startswith("model/params"))
    assert not differences(run_tiny(rounds=1), run_tiny(rounds=1, optimiser_state="kept"), only=lambda k: k.startswith("model/"))
