"""A round is all or nothing: whatever breaks it, the federation is as it was before."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from core_parts import Break, Plain, federation

from consilience import tree
from consilience.core.part import Part
from consilience.core.snapshot import snapshot
from consilience.errors import ConsilienceError, NonFiniteError
from consilience.parts.anchors import Anchors
from consilience.parts.cm import Cm
from consilience.parts.moon import Moon
from consilience.parts.mr import Mr
from consilience.parts.nova import Nova
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny, tiny_federation


@dataclass(frozen=True)
class Poison(Part):
    """A loss, or a gradient, that is NaN for one client in one round."""

    client: int = 3
    round: int = 2
    where: str = "loss"

    name = "poison"

    def _bad(self, v: Any) -> Any:
        return torch.where((v.client == self.client) & (v.round == self.round), float("nan"), 0.0)

    def loss(self, v: Any) -> Any:
        return self._bad(v) if self.where == "loss" else 0.0

    def grad(self, v: Any, g: Any) -> Any:
        return {k: t + self._bad(v) for k, t in g.items()} if self.where == "grad" else g


def frozen(fed):
    tensors, meta = snapshot(fed)
    return {k: t.clone() for k, t in tensors.items()}, copy.deepcopy(meta)


def assert_unchanged(fed, before):
    tensors, meta = snapshot(fed)
    assert meta == before[1]
    assert tensors.keys() == before[0].keys()
    assert [k for k in tensors if not torch.equal(tensors[k], before[0][k])] == []


def test_error_names_client_round_step_and_part():
    fed = tiny_federation([Poison()])
    fed.round()
    with pytest.raises(NonFiniteError) as error:
        fed.round()
    assert "the loss of part 'poison' at client 'client3', round 2, step 1." in str(error.value)
    assert error.value.exit_code == 3


def test_a_correction_is_named_too():
    fed = tiny_federation([Poison(round=1, client=0, where="grad"), Scaffold()])
    with pytest.raises(NonFiniteError, match=r"the update \(with corrections by scaffold, poison\) at client 'client0', round 1, step 1"):
        fed.round()


@pytest.mark.parametrize(("others", "share"), [([], "the loss of prox, steep"),
                                               ([Scaffold()], "the loss of prox, steep and corrections by scaffold")])
def test_only_parts_with_a_share_in_the_update_are_named(others, share):
    """Prox has a hook for corrections too, which on a CPU leaves the gradient as it is: there its pull is a term of the loss."""
    @dataclass(frozen=True)
    class Steep(Part):
        name = "steep"

        def loss(self, v):
            return 1e30 * sum(p.sum() for p in v.params.values())
    with pytest.raises(NonFiniteError) as error:
        tiny_federation([Steep(), Prox(), *others], lr=1e10).round()
    assert f"the update (with {share}) at client 'client0', round 1, step 1." in str(error.value)


def test_a_learning_rate_that_explodes():
    fed = federation(Plain(), lr=1e38, epochs=2)
    with pytest.raises(NonFiniteError, match=r"client 'client0', round 1, step \d+\. Use a smaller learning rate than 1e\+38"):
        fed.round()


@dataclass(frozen=True)
class Guard(Part):
    """It does what it warns of."""

    times: float = 1.0            # what leaves a client
    added: float = 0.0            # to what is published of all of them

    name = "guard"

    def caution(self, spec):
        return "drowns what clients learn. Use less of it."

    def release(self, c, uploads, model):
        return uploads, {**model, "params": tree.scale(model["params"], self.times)}

    def publish(self, s, owner, reduced, how):
        return {k: t + self.added for k, t in reduced.items()}


LIKELY = (r" The likely cause: guard drowns what clients learn\. Use less of it\. If that is not it, use a smaller learning rate than "
          r"0\.25, or look at the (client's )?data\.")


@pytest.mark.parametrize(("guard", "rounds", "where"), [
    (Guard(times=1e30), 2, r"at client 'client0', round 2, step 1\."),
    (Guard(times=1e300), 1, r"what guard made of the model of client 'client0', round 1, after step \d+\."),
    (Guard(added=1e300), 1, r"the new global model is not finite after aggregation \(guard\)\.")])
def test_what_was_warned_of_is_the_likely_cause_once_it_could_act(guard, rounds, where):
    fed = tiny_federation([guard], lr=0.25)
    for _ in range(rounds - 1):
        fed.round()
    with pytest.raises(NonFiniteError, match=where + LIKELY):
        fed.round()


def test_what_was_warned_of_is_not_the_cause_before_it_could_act():
    """In round one clients train on a model that nobody has touched."""
    with pytest.raises(NonFiniteError, match=r"round 1, step \d+\. Use a smaller learning rate than 1e\+38, or look at the client's data"):
        tiny_federation([Guard()], lr=1e38).round()


def test_samples_that_are_not_numbers():
    fed = tiny_federation(epochs=1)
    fed.samples.x[fed.samples.rows[1].train] = float("inf")
    with pytest.raises(NonFiniteError, match="the task's loss at client 'client1', round 1, step 1"):
        fed.round()


def test_a_model_that_aggregation_spoils():
    @dataclass(frozen=True)
    class Spoil(Part):
        name = "spoil"

        def aggregate(self, s, change):
            return {k: c / (2 - s.round) for k, c in change.items()}, s.server         # fine in round one, infinite in round two
    fed = run_tiny([Spoil(), Scaffold()], rounds=1)
    before = frozen(fed)
    with pytest.raises(NonFiniteError, match=r"Round 2: the new global model is not finite after aggregation \(scaffold, spoil\)"):
        fed.round()
    assert_unchanged(fed, before)


@pytest.mark.parametrize("others", [[], [Scaffold(), Moon()], [Anchors(), Mr()]], ids=["alone", "scaffold+moon", "anchors+mr"])
def test_nothing_of_a_broken_round_stays(others):
    fed = tiny_federation([Poison(), *others], optimiser_state="reset")
    fed.round()
    before = frozen(fed)
    with pytest.raises(NonFiniteError):
        fed.round()
    assert_unchanged(fed, before)
    # and the federation goes on as if nothing had happened
    fed.round([0, 1])
    calm = tiny_federation([Poison(client=99), *others], optimiser_state="reset")
    calm.round()
    calm.round([0, 1])
    assert not differences(fed, calm)


@pytest.mark.parametrize("at", ["survey", "receive", "loss", "finish", "server survey", "server finish", "aggregate"])
def test_interrupts_leave_no_trace(at):
    armed = []

    def act() -> None:
        if armed:
            raise KeyboardInterrupt
    fed = tiny_federation([Break(at=at, action=act), Scaffold()])
    fed.round()
    before = frozen(fed)
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        fed.round()
    assert_unchanged(fed, before)
    armed.clear()
    fed.round()
    assert not differences(fed, run_tiny([Break(), Scaffold()]))


def test_an_interrupt_between_two_clients():
    fed = run_tiny([Scaffold()], rounds=1)
    before = frozen(fed)

    def on_client(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt
    fed.on_client = on_client
    with pytest.raises(KeyboardInterrupt):
        fed.round()
    assert_unchanged(fed, before)


def test_an_interrupt_while_states_are_stored(monkeypatch):
    fed = run_tiny([Scaffold()], rounds=1)
    before = frozen(fed)
    put, calls = fed.clients.put, []

    def once(number, state):
        calls.append(number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        put(number, state)
    monkeypatch.setattr(fed.clients, "put", once)
    with pytest.raises(KeyboardInterrupt):
        fed.round()
    assert_unchanged(fed, before)


@pytest.mark.parametrize("part", [Scaffold(), Cm(), Nova()], ids=lambda p: p.name)
@pytest.mark.parametrize("schedule", ["cosine(rounds=2)", "exponential(gamma=1e-30)"])
def test_a_vanishing_learning_rate_gives_no_nan_in_silence(part, schedule):
    # these parts divide by the length of the path, which ends with the schedule or vanishes in float32
    fed = tiny_federation([part], schedule=schedule)
    try:
        for _ in range(3):
            fed.round()
    except ConsilienceError:
        return
    assert [k for k, t in snapshot(fed)[0].items() if not t.isfinite().all()] == []



@pytest.mark.parametrize("home", ["upload", "kept"])
def test_state_of_a_part_that_is_not_finite(home):
    @dataclass(frozen=True)
    class Leaky(Part):
        name = "leaky"
        reduce = {"x": "sum"}

        def init_kept(self, spec):
            return {"k": torch.zeros(())}

        def finish(self, c):
            bad = torch.tensor(float("nan"))
            return {"k": bad if home == "kept" else c.kept["k"]}, {"x": bad if home == "upload" else torch.zeros(())}
    with pytest.raises(NonFiniteError, match=r"'leaky' keeps or uploads .* step \d+\. Use a smaller learning rate than"):
        tiny_federation([Leaky()]).round()


def test_an_interrupt_while_preparing():
    fed = tiny_federation([Mr()])
    before = frozen(fed)
    real, calls = fed.train_plainly, []

    def once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)
    fed.train_plainly = once
    with pytest.raises(KeyboardInterrupt):
        fed.round()
    assert_unchanged(fed, before)
