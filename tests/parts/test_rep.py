"""FedRep: head first, then the base, against an ordinary loop with two optimisers."""

from __future__ import annotations

import pytest
import torch
from phase_loop import close, train_by_phases

from consilience.core.client import LocalWork
from consilience.errors import RefusedCombination
from consilience.parts.babu import Babu
from consilience.parts.rep import Rep
from consilience.testing import run_tiny, tiny_federation

BASE = ["stage1", "neck", "header."]


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_two_phases_against_a_plain_loop(head_epochs):
    fed = run_tiny([Rep(head_epochs=head_epochs)], rounds=1)
    start = fed.received(fed.client(3))
    net = train_by_phases(fed, 3, start, [("head", ["head."], head_epochs), ("base", BASE, 2)])
    fed.round([3])
    close({k: v for half in fed.model.values() for k, v in half.items() if not k.startswith("head.")}, net)
    close(fed.client(3).tensors["local"], net)


def test_phases_name_what_trains():
    fed = tiny_federation([Rep(head_epochs=4)])
    head, base = fed.phases
    assert set(head.keys) == {"head.weight", "head.bias"}
    assert set(base.keys) == set(fed.model["params"]) - set(head.keys)
    assert (head.epochs, base.epochs) == (4, None)


def test_the_base_is_fixed_while_the_head_trains():
    # only the head's phase is run; a base "frozen" by a zero gradient would still shrink under weight decay
    fed = tiny_federation([Rep()], weight_decay=0.5)
    work = LocalWork(fed, 0, fed.client(0), [0], {})
    slot = fed.make_slot(work)
    work.load(slot)
    fed.program.begin(slot, fed.phases[0])
    for size in work.schedule[0][1]:
        fed.program.step(slot, fed.phases[0], size)
    for k, p in fed.model["params"].items():
        assert torch.equal(slot.model["params"][k], p) is (not k.startswith("head.")), k
    assert slot.model["buffers"]["stage1.1.num_batches_tracked"].item() == 3        # statistics follow the batches, as declared


def test_statistics_of_the_local_heads_do_not_travel():
    fed, start = run_tiny([Rep()]), tiny_federation().model["params"]
    assert torch.equal(fed.model["params"]["head.weight"], start["head.weight"])


def test_refuses_another_claim_on_the_phases():
    with pytest.raises(RefusedCombination, match=r"babu.*rep|rep.*babu"):
        tiny_federation([Rep(), Babu()])
