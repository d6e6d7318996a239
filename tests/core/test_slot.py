"""Steps that hand on what they tracked leave behind what steps that copy it leave."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from consilience import tree
from consilience.core.client import ClientView, LocalWork
from consilience.core.part import Part
from consilience.core.slot import Slot
from consilience.core.step_view import StepView
from consilience.parts.ffa import Ffa
from consilience.parts.mr import Mr
from consilience.parts.sam import Sam
from consilience.testing import tiny_federation
from consilience.tree import Tree


@dataclass(frozen=True)
class Last(Part):
    """This step's mean feature, the step's before and both, the older first: all but the first read what they are written to."""

    name = "last"

    def init_scratch(self, c: ClientView) -> Tree:
        return {"now": torch.zeros(()), "before": torch.zeros(()), "both": torch.zeros(2), "same": torch.ones(1)}

    def track(self, v: StepView) -> Tree:
        old = v.scratch
        return {"now": v.features.mean().detach(), "before": old["now"], "both": old["both"].flip(0).view(2), "same": old["same"]}


def trained(parts: list[Part], together: bool) -> tuple[Slot, dict[str, Any], int]:
    """A slot after all steps of a client, the scratch it was loaded with, and how many steps these were."""
    fed = tiny_federation(parts, epochs=2)
    work = LocalWork(fed, 0, fed.client(0), [0], {})
    slot = fed.make_slot(work)
    work.load(slot)
    fixed = slot.scratch
    (phase, sizes), = work.schedule
    fed.program.begin(slot, phase)
    with slot.handing_on() if together else nullcontext():
        for size in sizes:
            fed.program.step(slot, phase, size)
    return slot, fixed, len(sizes)


@pytest.mark.parametrize("parts", [[Ffa(p=1.0)], [Mr()], [Ffa(p=0.5), Mr()], [Ffa(p=1.0), Sam()], [Last()]], ids=str)
def test_handing_on_equals_copying(parts: list[Part]) -> None:
    (one, _, steps), (other, fixed, _) = trained(parts, False), trained(parts, True)
    assert steps > 3
    assert other.scratch is fixed                          # at the addresses that the next client is loaded to
    pairs = list(tree.matched({"scratch": one.scratch, "model": one.model}, {"scratch": other.scratch, "model": other.model}))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(t.requires_grad for t in tree.leaves(other.scratch))


def slot_with(**scratch: torch.Tensor) -> Slot:
    slot = Slot(torch.zeros(1), torch.zeros(1), 1)
    slot.load(scratch={"p": scratch})
    return slot


def test_a_step_reads_all_that_it_tracked_before_it_writes() -> None:
    """One leaf becomes another, two change places, and one is a shifted view of itself: [1, 2, 3] → [2, 3, 3]."""
    slot = slot_with(now=torch.tensor(1.0), before=torch.tensor(0.0), a=torch.tensor(5.0), b=torch.tensor(6.0), row=torch.arange(1.0, 4.0))
    fixed, old = slot.scratch["p"], slot.scratch["p"]
    where = {k: t.data_ptr() for k, t in fixed.items()}
    slot.track("p", {"now": torch.tensor(2.0), "before": old["now"], "a": old["b"], "b": old["a"], "row": old["row"][[1, 2, 2]]})
    assert {k: t.tolist() for k, t in fixed.items()} == {"now": 2.0, "before": 1.0, "a": 6.0, "b": 5.0, "row": [2.0, 3.0, 3.0]}
    slot.track("p", {**fixed, "row": torch.as_strided(old["row"], (3,), (0,), 1)})
    assert fixed["row"].tolist() == [3.0, 3.0, 3.0]
    assert {k: t.data_ptr() for k, t in fixed.items()} == where


def test_what_does_not_read_what_is_written_is_not_cloned() -> None:
    slot = slot_with(a=torch.zeros(3), b=torch.zeros(3), same=torch.zeros(3))
    new = {"a": torch.ones(3), "b": torch.ones(3), "same": slot.scratch["p"]["same"]}
    clones = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            clones.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    with Count():
        slot.track("p", new)
    assert clones.count("copy_") == 2
    assert "clone" not in clones


def test_what_a_later_step_writes_to_is_copied() -> None:
    slot = Slot(torch.zeros(1), torch.zeros(1), 1)
    slot.load(model={"params": {"w": torch.tensor([1.0, 2.0])}}, scratch={"p": {"seen": torch.zeros(1)}, "q": {"fresh": torch.zeros(2)}})
    fixed = slot.scratch
    with slot.handing_on():
        w = slot.model["params"]["w"]
        slot.track("p", {"seen": w[1:]})                   # a view of a parameter
        slot.track("q", {"fresh": w * 3})
        w.add_(10.0)                                       # the next step
        assert float(slot.scratch["p"]["seen"]) == 2.0
        assert float(fixed["p"]["seen"]) == 0.0
    assert slot.scratch is fixed
    assert float(fixed["p"]["seen"]) == 2.0
    assert fixed["q"]["fresh"].tolist() == [3.0, 6.0]


def test_a_recording_that_breaks_leaves_the_scratch_where_it_was() -> None:
    slot = Slot(torch.zeros(1), torch.zeros(1), 1)
    slot.load(scratch={"p": {"seen": torch.zeros(1)}})
    fixed = slot.scratch

    def broken() -> None:
        with slot.handing_on():
            slot.track("p", {"seen": torch.ones(1)})
            raise RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        broken()
    assert slot.scratch is fixed
    assert float(fixed["p"]["seen"]) == 0.0
    slot.track("p", {"seen": torch.ones(1)})               # copied again
    assert float(fixed["p"]["seen"]) == 1.0
