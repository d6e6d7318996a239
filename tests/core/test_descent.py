"""Runs whose steps descend by gradients as they came, with kernels (`kernels/test_sgd.py`) and without: the same numbers.

The kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from consilience import rng, tree
from consilience.core.client import LocalWork
from consilience.core.correction import Correction
from consilience.core.diagnose import without_effect
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part, Phase
from consilience.core.policy import Policy
from consilience.core.slot import Slot
from consilience.engines.sequential import Sequential
from consilience.engines.slots import Slots
from consilience.errors import NonFiniteError
from consilience.kernels import sgd
from consilience.kernels.reach import Reach
from consilience.layers import bfloat16
from consilience.parts import PARTS
from consilience.parts.cm import Cm
from consilience.parts.ditto import Ditto
from consilience.parts.dyn import Dyn
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.testing import largest_difference, state_of, tiny_population, trial
from kernel_device import COMPILED, DEVICE, INTERPRETED, ON_HOST, needs_cuda, needs_kernels


def test_a_recording_has_room_for_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rehearsed tables of 3 and 4 numbers, each from an even place on: room for 8. A recording that asks for more is refused."""
    slot = Slot(torch.zeros(1), torch.zeros(1), 1)
    slot.rehearse()
    first, second = torch.arange(3), torch.arange(4)
    assert torch.equal(slot.table(first), first)
    slot.table(second)
    slot.reserve(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    slot.x = SimpleNamespace(is_cuda=True, device="cpu")               # type: ignore[assignment]
    tables = [slot.table(first), slot.table(second)]
    with pytest.raises(RuntimeError, match="larger tables"):
        slot.table(torch.arange(1))
    slot.fill_tables()
    assert [t.tolist() for t in tables] == [[0, 1, 2], [0, 1, 2, 3]]


# in whole runs

class Shrinking(nn.Module):
    """Maps of 8 × 8, 4 × 4, 2 × 2 and 1 × 1, with kernels of 3 × 3 throughout."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside, stride in ((1, 4, 2), (4, 6, 2), (6, 8, 2), (8, 8, 1)):
            layers += [nn.Conv2d(inside, outside, 3, stride, 1, bias=outside == 6), nn.BatchNorm2d(outside), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def federation(parts: list[Part], engine: object = Sequential, kind: type[Shrinking] = Shrinking, **policy: object) -> Federation:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = kind()
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "batch": 8, "epochs": 2, "precision": "bfloat16",
                "layout": "channels_last"} | policy
    layout = Layout(head="head", stages=("body.2", "body.5"), extractor=("body",))
    return Federation(module, layout, Method(parts), tiny_population(), Policy(**settings), engine, DEVICE)      # type: ignore[arg-type]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used where tests of kernels run, and by what they are used is counted."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs launches")
    if ON_HOST:
        monkeypatch.setattr(sgd, "usable", lambda params: True)
    if INTERPRETED:                                       # which cuts off what PyTorch rounds: so let both
        monkeypatch.setattr(bfloat16, "narrowed", cutting_off)
    monkeypatch.setattr(bfloat16, "SMALL", 0)


def cutting_off(weights: Iterable[Tensor], reaches: list[Reach | None], kept: list[Tensor | None], rounded: Any = bfloat16.narrowed) -> Any:
    weights = list(weights)
    out = rounded(weights, reaches, kept)
    for weight, part, ready, narrow in zip(weights, reaches, kept, out):
        if ready is None:
            piece = weight.detach() if part is None else part.of(weight.detach())
            narrow.copy_((piece.view(torch.int32) & -(1 << 16)).view(torch.float32))
    return out


def trained(fed: Federation, recorded: bool) -> Slot:
    """A slot after all steps of client 0, as they are made one by one or as they are recorded."""
    work = LocalWork(fed, 0, fed.client(0), [0], {})
    slot = fed.make_slot(work)
    work.load(slot)
    for phase, sizes in work.schedule:
        fed.program.begin(slot, phase)
        for size in sizes[:1] if recorded else sizes:
            fed.program.step(slot, phase, size)
        if recorded:
            with fed.program.recording(slot):
                for size in sizes[1:]:
                    fed.program.step(slot, phase, size)
    return slot


def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often weights descended, those out of reach caught up, and weights and gradients were cast."""
    calls = {"descend": 0, "rest": 0, "cast": 0, "wide": 0}
    descend, rest, cast = sgd.descend, sgd.rest, bfloat16.cast

    def counted(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return act(*args)
        return call

    def counted_cast(given: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = list(given)
        if given:
            calls["cast" if dtype == torch.bfloat16 else "wide"] += 1
        return cast(given, dtype)
    monkeypatch.setattr(sgd, "descend", counted("descend", descend))
    monkeypatch.setattr(sgd, "rest", counted("rest", rest))
    monkeypatch.setattr(bfloat16, "cast", counted_cast)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [{}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"layout": "contiguous"}], ids=str)
def test_a_clients_round_is_the_same_with_and_without(kernels: None, monkeypatch: pytest.MonkeyPatch, policy: dict[str, object]) -> None:
    """One by one, recorded, and by gradients that are cast back. What is out of reach moves too: by its decay."""
    one, recorded = trained(federation([], **policy), False), trained(federation([], **policy), True)
    monkeypatch.setattr(sgd, "usable", lambda params: False)
    plain = trained(federation([], **policy), False)
    start = federation([], **policy).model["params"]
    for slot in (recorded, plain):
        for (key, a), b in zip(one.model["params"].items(), slot.model["params"].values()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)
        assert torch.equal(one.counter, slot.counter)
    dead = one.model["params"]["body.9.weight"][:, :, 0, 0]
    assert torch.equal(dead, start["body.9.weight"][:, :, 0, 0]) is (policy.get("weight_decay") == 0.0)


@pytest.mark.gpu
def test_recorded_steps_cast_once_and_put_off(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps an epoch, two epochs: six made one by one, or one so and five recorded together."""
    fed = federation([])
    calls = count(monkeypatch)
    trained(fed, False)
    assert {name: n for name, n in calls.items() if name != "wide"} == {"descend": 6, "rest": 6, "cast": 6}
    calls.update(dict.fromkeys(calls, 0))
    trained(fed, True)
    assert {name: n for name, n in calls.items() if name != "wide"} == {"descend": 6, "rest": 2, "cast": 2}
    assert calls["wide"] == 0


class Reader(Part):
    """Looks at all parameters in every step."""

    name = "reader"

    def loss(self, v):                                    # type: ignore[no-untyped-def]
        assert len(v.params) > 3
        return 0.0


@pytest.mark.gpu
def test_nobody_sees_a_weight_that_is_behind(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    looked = trained(federation([Reader()]), True)
    assert calls["rest"] == 6
    unseen = trained(federation([]), True)
    assert all(torch.equal(a, b) for a, b in tree.matched(looked.model, unseen.model))


class Peeking(Shrinking):
    """Looks, without a gradient, at a kernel's corner that meets no map."""

    least: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.least.append(self.body[9].weight.detach()[:, :, 0, 0].abs().sum())
        return super().forward(x)


@pytest.mark.gpu
def test_no_module_sees_a_kernel_that_is_behind(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is out of reach shrinks by its decay in every step, and ends as if nobody had looked."""
    looks = []
    for recorded in (False, True):
        monkeypatch.setattr(Peeking, "least", [])
        looked = trained(federation([], kind=Peeking), recorded)
        looks.append(torch.stack(Peeking.least))
        assert len(looks[-1].unique()) == 6
    assert torch.equal(*looks)
    unseen = trained(federation([]), True)
    assert all(torch.equal(a, b) for a, b in tree.matched(looked.model, unseen.model))


class OwnReader(Ditto):
    """Looks at its personal model by its own name while that is in training."""

    name = acts_on = "own"
    least: ClassVar[list[float]] = []

    def phases(self, phases, spec):                       # type: ignore[no-untyped-def]
        return [Phase("own", phases[0].keys, model="own", epochs=2)]

    def loss(self, v):                                    # type: ignore[no-untyped-def]
        self.least.append(v.personal["model"]["params"]["body.9.weight"][:, :, 0, 0].abs().sum().item())
        return 0.0


@pytest.mark.gpu
def test_nobody_sees_a_personal_model_that_is_behind(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is out of reach shrinks by its decay in every step."""
    monkeypatch.setattr(OwnReader, "least", [])
    trained(federation([OwnReader()]), True)
    assert len(OwnReader.least) == len(set(OwnReader.least)) == 6


@pytest.mark.gpu
def test_steps_that_are_put_off_hold_on_to_no_gradient(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    act = sgd.descend
    monkeypatch.setattr(sgd, "descend", lambda moves, *how: held.extend(weakref.ref(m.grad) for m in moves) or act(moves, *how))
    fed = federation([])
    work = LocalWork(fed, 0, fed.client(0), [0], {})
    slot = fed.make_slot(work)
    work.load(slot)
    (phase, sizes), = work.schedule
    fed.program.begin(slot, phase)
    with fed.program.recording(slot):
        for size in sizes:
            fed.program.step(slot, phase, size)
            assert held
            assert all(ref() is None for ref in held)
    fed.program.step(slot, phase, sizes[0])
    assert all(ref() is None for ref in held)


class Zoom(Part):
    """Looks at the model on images of twice the size, and again on those of its own."""

    name = "zoom"
    seen: ClassVar[list[Tensor]] = []

    def loss(self, v):                                    # type: ignore[no-untyped-def]
        with torch.no_grad():
            for x in (v.batch.x.repeat_interleave(2, 2).repeat_interleave(2, 3), v.batch.x):
                self.seen.append(v.forward(v.model, x).logits)
        return 0.0


@pytest.mark.gpu
def test_weights_are_kept_for_maps_of_their_size_alone(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for recorded in (False, True):
        monkeypatch.setattr(Zoom, "seen", [])
        trained(federation([Zoom()]), recorded)
        looks.append(torch.stack(Zoom.seen))
    torch.testing.assert_close(*looks, rtol=0.02, atol=0.02)


class Decay(Part):
    """A loss on the weights themselves, whose gradient comes beside the one through their casts."""

    name = "decay"

    def loss(self, v):                                    # type: ignore[no-untyped-def]
        return 0.1 * sum(p.square().sum() for p in v.params.values())


@pytest.mark.gpu
def test_gradients_of_both_kinds_add_up(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trained(federation([Decay()]), True)
    monkeypatch.setattr(sgd, "usable", lambda params: False)
    theirs, without = trained(federation([Decay()]), False), trained(federation([]), False)
    for (key, a), b in zip(ours.model["params"].items(), theirs.model["params"].values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)
    assert not torch.allclose(ours.model["params"]["body.0.weight"], without.model["params"]["body.0.weight"], atol=1e-3)


@pytest.mark.gpu
def test_the_next_client_starts_from_its_own_weights(kernels: None) -> None:
    """What a recording kept in bfloat16 is nobody's afterwards."""
    fed = federation([])
    slot = trained(fed, True)
    work = LocalWork(fed, 1, fed.client(1), [1], {})
    seen = []
    for own in (slot, fed.make_slot(work)):
        work.load(own)
        (phase, sizes), = work.schedule
        fed.program.begin(own, phase)
        fed.program.step(own, phase, sizes[0])
        seen.append(tree.clone(own.model))
    assert all(torch.equal(a, b) for a, b in tree.matched(*seen))


@pytest.mark.gpu
def test_a_part_that_corrects_the_gradient_has_it_in_float32(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seen = count(monkeypatch), set()

    class Watcher(Part):
        name = "watcher"

        def grad(self, v, g):                             # type: ignore[no-untyped-def]
            seen.update((t.dtype, t.shape == v.params[k].shape) for k, t in g.items())
            return g
    watched = trained(federation([Watcher()]), True)
    assert (calls["descend"], seen) == (0, {(torch.float32, True)})
    plain = trained(federation([]), True)
    for (key, a), b in zip(watched.model["params"].items(), plain.model["params"].values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_trains_alike(kernels: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Recorded or one by one bit for bit, by the kernel or by gradients cast back to within rounding, in all that a step leaves behind."""
    if name == "apple":
        pytest.skip("a client of it trains on what a whole round delivers")
    if name == "dp":
        pytest.importorskip("dp_accounting")
    one, recorded = (trained(federation([trial(PARTS[name])]), together) for together in (False, True))
    monkeypatch.setattr(sgd, "usable", lambda params: False)
    plain = trained(federation([trial(PARTS[name])]), False)
    for home in ("model", "personal", "scratch", "optimiser"):
        for a, b in tree.matched(getattr(one, home), getattr(recorded, home)):
            assert torch.equal(a, b), home
        for a, b in tree.matched(getattr(one, home), getattr(plain, home)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=home)


# with what parts declare to be added to the gradient

STACKS: dict[str, list[Part]] = {"scaffold": [Scaffold()], "prox": [Prox(mu=5.0)], "dyn": [Dyn(alpha=0.5)], "ditto": [Ditto(weight=5.0)],
                                 "prox+scaffold": [Prox(mu=0.5), Scaffold()]}


def stirred(fed: Federation) -> Federation:
    """As if rounds had passed: whatever parts share and keep is not zero any more."""
    def drawn(name: str, home: tree.Tree) -> tree.Tree:
        return tree.map(lambda t: torch.empty_like(t).copy_(0.1 * rng.normal(rng.key(0, name), tuple(t.shape))), home)
    fed.shared, state = drawn("shared", fed.shared), fed.client(0)
    fed.clients.put(0, replace(state, tensors={**state.tensors, "kept": drawn("kept", state.tensors["kept"])}))
    return fed


def losses_of(slot: Slot) -> Tensor:
    return slot.losses[: int(slot.counter)]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [{}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"layout": "contiguous"}], ids=str)
@pytest.mark.parametrize("stack", STACKS)
def test_declared_corrections_are_the_same_with_and_without(kernels: None, monkeypatch: pytest.MonkeyPatch, stack: str,
                                                            policy: dict[str, object]) -> None:
    """One by one and recorded bit for bit, by gradients that are cast back within rounding; so are the losses, with the pull's term."""
    calls = count(monkeypatch)
    one, recorded = (trained(stirred(federation(STACKS[stack], **policy)), together) for together in (False, True))
    assert calls["descend"] == 2 * int(one.counter)
    assert calls["wide"] == 0
    monkeypatch.setattr(sgd, "usable", lambda params: False)
    plain, without = trained(stirred(federation(STACKS[stack], **policy)), False), trained(federation([], **policy), False)
    for home in ("model", "personal", "optimiser"):
        for a, b in tree.matched(getattr(one, home), getattr(recorded, home)):
            assert torch.equal(a, b), home
        for a, b in tree.matched(getattr(one, home), getattr(plain, home)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=home)
    for other in (recorded, plain):
        torch.testing.assert_close(losses_of(one), losses_of(other), rtol=1e-4, atol=1e-5)
    dead = lambda slot: slot.model["params"]["body.9.weight"][:, :, 0, 0]
    still = stack == "ditto" or (stack == "prox" and policy.get("weight_decay") == 0.0)      # trains another model; begins at its target
    assert torch.allclose(dead(one), dead(without), rtol=0.0, atol=1e-4) is still


@pytest.mark.gpu
def test_the_loss_of_every_step_holds_the_distances_of_all_weights(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those out of reach among them, which move later: what a term of the loss would be, asked in every step."""
    @dataclass(frozen=True)
    class Asking(Prox):
        name = "asking"
        seen: ClassVar[list[Tensor]] = []

        def loss(self, v):                                # type: ignore[no-untyped-def]
            self.seen.append(0.5 * self.mu * tree.sq_dist(v.params, v.received["params"]).detach())      # type: ignore[union-attr]
            return 0.0
    asked, unasked = (trained(federation([part], lr=0.2), True) for part in (Asking(mu=20.0), Prox(mu=20.0)))
    torch.testing.assert_close(losses_of(asked), losses_of(unasked), rtol=1e-5, atol=0.0)
    monkeypatch.setattr(sgd, "note", lambda *given: None)
    bare = trained(federation([Prox(mu=20.0)], lr=0.2), True)
    torch.testing.assert_close(losses_of(unasked) - losses_of(bare), torch.stack(Asking.seen), rtol=1e-3, atol=1e-5)
    assert Asking.seen[-1] > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("stack", ["scaffold", "prox", "prox+scaffold"])
def test_recorded_steps_with_corrections_cast_once_and_put_off(kernels: None, monkeypatch: pytest.MonkeyPatch, stack: str) -> None:
    fed = federation(STACKS[stack])
    calls = count(monkeypatch)
    trained(fed, True)
    assert calls == {"descend": 6, "rest": 2, "cast": 2, "wide": 0}


@dataclass(frozen=True)
class Growing(Part):
    """Adds another tree in every step."""

    name = "growing"

    def init_scratch(self, c):                            # type: ignore[no-untyped-def]
        return {"add": tree.map(torch.ones_like, c.received["params"])}

    def track(self, v):                                   # type: ignore[no-untyped-def]
        return {"add": tree.scale(v.scratch["add"], 1.5)}

    def correction(self, v):                              # type: ignore[no-untyped-def]
        return Correction(add=v.scratch["add"])


@pytest.mark.gpu
def test_corrections_that_change_are_not_put_off(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch)
    one, recorded = (trained(federation([Growing()]), together) for together in (False, True))
    assert (calls["descend"], calls["rest"]) == (12, 12)
    assert all(torch.equal(a, b) for a, b in tree.matched(one.model, recorded.model))


@dataclass(frozen=True)
class Added(Part):
    """One more tree to be added."""

    name = "added"

    def correction(self, v):                              # type: ignore[no-untyped-def]
        return Correction(add=v.received["params"])


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [[Prox(mu=0.5), Dyn(alpha=0.5)], [Added(), Scaffold()], [Prox(mu=0.5), Cm()]], ids=str)
def test_more_than_the_kernel_adds_is_added_in_float32(kernels: None, monkeypatch: pytest.MonkeyPatch, parts: list[Part]) -> None:
    """Two pulls, two trees, or a part that looks at the gradient."""
    calls = count(monkeypatch)
    one = trained(stirred(federation(parts)), True)
    assert calls["descend"] == 0
    monkeypatch.setattr(sgd, "usable", lambda params: False)
    assert all(torch.equal(a, b) for a, b in tree.matched(one.model, trained(stirred(federation(parts)), False).model))


@pytest.mark.gpu
def test_a_pull_whose_term_is_not_finite_is_named(kernels: None) -> None:
    """By 1e38 numbers that are 1 away: their gradient is in range of float32, half of their sum of squares is not."""
    @dataclass(frozen=True)
    class Away(Part):
        name = "away"

        def init_scratch(self, c):                        # type: ignore[no-untyped-def]
            return {"target": tree.map(lambda t: t + 1, c.received["params"])}

        def correction(self, v):                          # type: ignore[no-untyped-def]
            return Correction(strength=1e38, target=v.scratch["target"])
    with pytest.raises(NonFiniteError, match="the loss of part 'away' at client 'client0', round 1, step 1"):
        federation([Away()], lr=1e-10).round()


@pytest.mark.gpu
def test_a_pull_to_nothing_has_no_effect(kernels: None) -> None:
    @dataclass(frozen=True)
    class Idle(Part):
        name = "idle"

        def correction(self, v):                          # type: ignore[no-untyped-def]
            return Correction(strength=1.0)
    fed = federation([Idle(), Prox(mu=0.1), Scaffold()])
    assert without_effect(fed, LocalWork(fed, 0, fed.client(0), [0], {})) == ["idle"]


@pytest.mark.gpu
@pytest.mark.parametrize("stack", ["fedavg", *STACKS])
def test_slots_equal_sequential(stack: str) -> None:
    needs_cuda()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    runs, losses = [], []
    for engine in (Sequential, Slots, Slots):
        fed = federation(STACKS.get(stack, []), engine)
        losses.append([loss for _ in range(3) for loss in fed.round().losses.values()])
        runs.append(fed)
    one, many, again = runs
    assert many.engine.captured, many.engine.notes        # type: ignore[attr-defined]
    assert largest_difference(one, many) <= 1e-5
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[1] == losses[2]
    assert all(torch.equal(t, state_of(again)[k]) for k, t in state_of(many).items())
