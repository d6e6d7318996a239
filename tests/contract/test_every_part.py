"""Every part alone keeps the contract: one test for each check of each part."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from consilience import testing
from consilience.core.federation import Federation
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.errors import ConfigError
from consilience.parts import PARTS
from consilience.parts._reasons import WHOLE_MODELS
from consilience.parts.registry import check_class
from consilience.testing import differences, run_tiny, state_of, trial

CHECKS = (testing.check_trains, testing.check_unmutated, testing.check_order, testing.check_capturable,
          testing.check_checkpoint, testing.check_partial_batches)
NAMES = sorted(PARTS)
SMALL: dict[str, Any] = {"sizes": (16, 9, 5, 8), "epochs": 1}        # three clients that train, in few steps
NEED_FRESH_SGD = ("cm", "nova", "scaffold")        # they refuse momentum that is kept across rounds


@cache
def plain(name: str) -> Federation:
    """Two ordinary rounds of a part, which the checks only look at."""
    return testing.plain_rounds(trial(PARTS[name]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))        # all of a part's, for they share rounds
@pytest.mark.parametrize("name", NAMES)
def test_contract(check: Any, name: str) -> None:
    given = [plain(name)] if "plain" in inspect.signature(check).parameters else []
    check(trial(PARTS[name]), *given)


@pytest.mark.parametrize("name", NAMES)
def test_is_fedavg_at_its_neutral_setting(name: str) -> None:
    testing.check_neutral(PARTS[name])


@pytest.mark.parametrize("name", NAMES)
def test_declares_what_it_is(name: str) -> None:
    cls = PARTS[name]
    check_class(cls, name)
    assert (cls.neutral is None) == bool(cls.not_neutral), "a neutral setting, or the reason why there is none; not both"
    assert cls.paper
    assert cls.helps
    assert cls.__doc__


@pytest.mark.parametrize("batchnorm", ["params", "local"])
@pytest.mark.parametrize("name", NAMES)
def test_order_of_clients_under_other_policies(name: str, batchnorm: str) -> None:
    """As check_order does, with statistics that stay at home and an optimiser that remembers."""
    part = trial(PARTS[name])
    how = {"batchnorm": batchnorm, "optimiser_state": "kept", **SMALL}
    if name in NEED_FRESH_SGD:
        how["momentum"] = 0.0
    order = (0,) if part.pools else (3, 1, 0, 2)
    if batchnorm == "local" and WHOLE_MODELS in part.traits:
        with pytest.raises(ConfigError, match="sends whole models to other clients"):
            run_tiny([part], **how)
        return
    assert not differences(run_tiny([part], **how), run_tiny([part], order=order, **how))


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_layout_changes_rounding_alone(name: str) -> None:
    """On a GPU it is chosen for the model. A bias before a norm has no gradient but rounding, which FedGen's Adam makes large: left out."""
    one, other = (state_of(run_tiny([trial(PARTS[name])], layout=layout, **SMALL)) for layout in ("contiguous", "channels_last"))
    assert one.keys() == other.keys()
    for path in one.keys() - {"shared/gen/generator/in.bias"}:
        torch.testing.assert_close(one[path], other[path], rtol=1e-4, atol=2e-5)


IDLE = {"sam": {"rho": 0.0}, "prox": {"mu": 0.0}, "mixup": {"alpha": 0.0}, "ffa": {"p": 0.0}, "constraint": {"weight": 0.0}}


def idle_parts() -> list[Part]:
    return [PARTS[name](**settings) for name, settings in IDLE.items()]


@pytest.mark.parametrize("name", NAMES)
def test_idle_partners_change_no_bit(name: str) -> None:
    """A second pass, a zero pull, a zero mix or a tap that does nothing disturbs no state of another part."""
    part = trial(PARTS[name])
    alone = run_tiny([part], **SMALL)
    keys = set(state_of(alone))
    partners = [i for i in idle_parts() if Method.conflict(part, i) is None]
    assert len(partners) >= 3
    for idle in partners:
        wrong = differences(alone, run_tiny([part, idle], **SMALL), only=lambda k: k in keys)
        assert not wrong, f"{idle.name} disturbs {name}: {wrong[:3]}"


def test_all_idle_parts_together_are_fedavg() -> None:
    alone = run_tiny()
    keys = set(state_of(alone))
    assert not differences(alone, run_tiny(idle_parts()), only=lambda k: k in keys)


def test_check_notices_a_part_that_is_not_finite() -> None:
    """The checks can fail: a part that breaks a rule is refused by the check of that rule."""
    class Endless(Part):
        name = "endless"

        def init_shared(self, spec: Any) -> Any:
            return {"x": torch.tensor(float("inf"))}
    with pytest.raises(AssertionError, match="not finite"):
        testing.check_trains(Endless())


def test_check_notices_a_part_that_writes_to_its_arguments() -> None:
    class Scribbler(Part):
        name = "scribbler"
        reduce = {"one": "sum"}

        def init_shared(self, spec: Any) -> Any:
            return {"count": torch.zeros(())}

        def finish(self, c: Any) -> Any:
            return {}, {"one": torch.ones(())}

        def server(self, s: Any) -> Any:
            s.shared["count"].add_(1)
            return s.shared, {}
    with pytest.raises(AssertionError, match="wrote to"):
        testing.check_unmutated(Scribbler())


def test_check_notices_a_part_that_remembers_the_order_of_clients() -> None:
    class Gossip(Part):
        name = "gossip"
        heard: list[int] = []

        def loss(self, v: Any) -> Any:
            self.heard.append(1)
            return 1e-3 * len(self.heard) * v.features.square().mean()
    with pytest.raises(AssertionError, match="order of clients"):
        testing.check_order(Gossip())


def test_check_notices_a_step_that_looks_at_a_value() -> None:
    class Peeker(Part):
        name = "peeker"

        def loss(self, v: Any) -> Any:
            return v.features.square().mean() if v.round > 1 else 0.0
    with pytest.raises(AssertionError, match="calls back to the host"):
        testing.check_capturable(Peeker())


def test_check_notices_a_number_frozen_into_a_recorded_step() -> None:
    class Counter(Part):
        name = "counter"
        calls: list[int] = []

        def loss(self, v: Any) -> Any:
            self.calls.append(1)
            return 0.01 * (len(self.calls) % 7) * v.features.square().mean()
    with pytest.raises(AssertionError, match="recorded step differs"):
        testing.check_capturable(Counter())


def test_check_notices_state_outside_the_state() -> None:
    class Forgetful(Part):
        name = "forgetful"

        def __init__(self) -> None:
            self.rounds: list[int] = []

        def init_scratch(self, c: Any) -> Any:
            self.rounds.append(c.round)
            return {"k": torch.tensor(float(len(self.rounds)))}

        def loss(self, v: Any) -> Any:
            return 0.01 * v.scratch["k"] * v.features.square().mean()
    part = Forgetful()
    whole = run_tiny([part], rounds=2)
    part.rounds.clear()
    first = run_tiny([part], rounds=1)
    part.rounds.clear()                                     # the process ends; what is not in the state is lost
    second = testing.tiny_federation([part])
    testing.restore(second, *testing.snapshot(first))
    second.round()
    assert differences(whole, second)


def test_check_notices_a_step_that_writes_to_what_it_received() -> None:
    """A slot holds copies, so nothing of the round's inputs shows it."""
    class Scrawler(Part):
        name = "scrawler"

        def loss(self, v: Any) -> Any:
            for p in v.received["params"].values():
                p.data.add_(0.1)
            return 0.0

    with pytest.raises(AssertionError, match=r"scrawler: a step wrote to .*received"):
        testing.check_unmutated(Scrawler())


def test_check_notices_a_part_that_remembers_whom_it_chose() -> None:
    class Fickle(Part):
        name = "fickle"
        asked: list[int] = []

        def choose(self, s: Any, drawn: list[int]) -> list[int]:
            self.asked.append(s.round)
            return [s.ids[0], s.ids[1 + len(self.asked) % 2]]
    with pytest.raises(AssertionError, match="differs after a checkpoint"):
        testing.check_checkpoint(Fickle())


def test_check_notices_a_part_that_notes_on_the_server_whom_it_chooses() -> None:
    class Clerk(Part):
        name = "clerk"

        def init_server(self, spec: Any) -> Any:
            return {"chosen": torch.zeros(spec.population)}

        def choose(self, s: Any, drawn: list[int]) -> list[int]:
            s.server["chosen"][drawn] += 1
            return drawn
    with pytest.raises(AssertionError, match="wrote to"):
        testing.check_unmutated(Clerk())


def test_check_notices_a_part_that_chooses_at_its_neutral_setting() -> None:
    @dataclass(frozen=True)
    class Eager(Part):
        name = "eager"
        neutral = {}

        def choose(self, s: Any, drawn: list[int]) -> list[int]:
            return s.ids[-2:]
    with pytest.raises(AssertionError, match="differs from FedAvg at its neutral setting"):
        testing.check_neutral(Eager)
