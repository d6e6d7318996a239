"""A method: the order of its parts, what is refused, and which hooks act in which phase."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from consilience.core.method import Method
from consilience.core.part import EXCLUSIVE, HOOKS, STEP_HOOKS, TASK_HOOKS, Part, Phase
from consilience.errors import RefusedCombination
from consilience.parts import PARTS
from consilience.parts.babu import Babu
from consilience.parts.debias import Debias
from consilience.parts.ditto import Ditto
from consilience.parts.mixup import Mixup
from consilience.parts.moon import Moon
from consilience.parts.mr import Mr
from consilience.parts.prox import Prox
from consilience.parts.rep import Rep
from consilience.parts.sam import Sam
from consilience.parts.scaffold import Scaffold
from consilience.testing import tiny_federation


def test_ranks_and_names_fix_the_order():
    parts = [Scaffold(), Mixup(), Prox(), Moon()]
    orders = {tuple(p.name for p in Method(stack).parts) for stack in itertools.permutations(parts)}
    assert orders == {("mixup", "scaffold", "moon", "prox")}


def test_every_hook_is_known():
    assert set(TASK_HOOKS) | set(STEP_HOOKS) | set(EXCLUSIVE) <= set(HOOKS)
    assert all(callable(getattr(Part, h)) for h in HOOKS)


@dataclass(frozen=True)
class OtherSam(Part):
    name = "othersam"

    def gradient(self, v, grad_at):
        return grad_at(v.params)


def test_two_parts_for_one_exclusive_hook():
    with pytest.raises(RefusedCombination, match="othersam and sam cannot be combined: both define `gradient`"):
        Method([Sam(), OtherSam()])


def test_two_claims_on_one_thing():
    words = r"both claim the phases of the model \(babu never trains the head; rep trains head and base"
    with pytest.raises(RefusedCombination, match=words):
        Method([Rep(), Babu()])


def test_refusals_are_the_same_in_both_orders():
    for a, b in itertools.combinations([cls() for cls in PARTS.values()], 2):
        assert (Method.conflict(a, b) is None) == (Method.conflict(b, a) is None), (a.name, b.name)


def test_hooks_of_a_phase():
    method = Method([Mixup(), Prox(), Ditto(), Mr(), Debias()])
    main = method.hooks(Phase("main", (), "model"), uploads=True)
    second = method.hooks(Phase("ditto", (), "ditto"), uploads=False)
    plain = method.hooks(Phase("plain", (), "plain"), uploads=False)
    names = lambda parts: [p.name for p in parts]
    assert names(main["batch"]) == names(second["batch"]) == names(plain["batch"]) == ["mixup"]      # defines the task: everywhere
    assert names(main["terms"]) == ["debias", "mr", "prox"]          # by a loss or by a correction, in one order
    assert names(main["corrections"]) == ["prox"]
    assert "ditto" not in names(main["terms"])
    assert names(second["terms"]) == ["ditto"]
    assert names(plain["terms"]) == []
    assert "mr" in names(main["track"])


def test_what_is_not_uploaded_is_not_followed():
    # FedRep's head phase uploads nothing: no statistics and no adversary act in it
    fed = tiny_federation([Rep(), Mr(), Debias()])
    assert fed.program.hooks["head"]["track"] == fed.program.hooks["head"]["adversary"] == []
    assert [p.name for p in fed.program.hooks["base"]["track"]] == ["mr"]
    assert [p.name for p in fed.program.hooks["base"]["adversary"]] == ["debias"]
