"""Steps that hand on what they tracked leave behind what steps that copy it leave."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from consilience import tree
from consilience.core.client import LocalWork
from consilience.core.part import Part
from consilience.core.slot import Slot
from consilience.parts.ffa import Ffa
from consilience.parts.mr import Mr
from consilience.parts.sam import Sam
from consilience.testing import tiny_federation


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


@pytest.mark.parametrize("parts", [[Ffa(p=1.0)], [Mr()], [Ffa(p=0.5), Mr()], [Ffa(p=1.0), Sam()]], ids=str)
def test_handing_on_equals_copying(parts: list[Part]) -> None:
    (one, _, steps), (other, fixed, _) = trained(parts, False), trained(parts, True)
    assert steps > 3
    assert other.scratch is fixed                          # at the addresses that the next client is loaded to
    pairs = list(tree.matched({"scratch": one.scratch, "model": one.model}, {"scratch": other.scratch, "model": other.model}))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(t.requires_grad for t in tree.leaves(other.scratch))


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
