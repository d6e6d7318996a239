"""FedBABU: a head that nothing moves, and fine-tuning that leaves no trace."""

from __future__ import annotations

import torch
from phase_loop import close, train_by_phases

from consilience.parts.babu import Babu
from consilience.parts.scaffold import Scaffold
from consilience.testing import run_tiny, state_of, tiny_federation

EVERYTHING = ["stage1", "neck", "header", "head"]


def test_frozen_means_frozen():
    # weight decay shrinks and SCAFFOLD's correction moves whatever gets a gradient, even a zero one
    fed, start = run_tiny([Babu(), Scaffold()], weight_decay=0.1), tiny_federation().model["params"]
    for k in ("head.weight", "head.bias"):
        assert torch.equal(fed.model["params"][k], start[k])
        assert k not in fed.shared["scaffold"]["c"]
        assert k not in fed.spec.trained
    assert not torch.equal(fed.model["params"]["neck.1.weight"], start["neck.1.weight"])


def test_body_trains_as_in_a_plain_loop():
    fed = run_tiny([Babu()], rounds=1)
    net = train_by_phases(fed, 0, fed.model, [("main", ["stage1", "neck", "header"], 2)])
    fed.round([0])
    close({k: v for half in fed.model.values() for k, v in half.items()}, net)


def test_fine_tuning_trains_the_whole_model_and_leaves_no_trace():
    fed = run_tiny([Babu(fine_tune=2)], rounds=1)
    before = state_of(fed)
    personal, taps = fed.personal_model(0)
    after = state_of(fed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    # the same as two plain epochs of everything from the global model
    net = train_by_phases(fed, 0, fed.model, [("plain", EVERYTHING, 2)], round_number=fed.round_number)
    close({**personal["params"], **personal["buffers"]}, net)
    assert not torch.equal(personal["params"]["head.weight"], fed.model["params"]["head.weight"])
    assert taps


def test_fine_tuning_between_rounds_changes_no_later_round():
    looked, not_looked = run_tiny([Babu(fine_tune=1)], rounds=1), run_tiny([Babu(fine_tune=1)], rounds=1)
    for i in range(4):
        looked.personal_model(i)
    looked.round()
    not_looked.round()
    a, b = state_of(looked), state_of(not_looked)
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_without_fine_tuning_the_global_model_is_served():
    fed = run_tiny([Babu(fine_tune=0)], rounds=1)
    model, _ = fed.personal_model(0)
    assert all(torch.equal(model["params"][k], p) for k, p in fed.model["params"].items())


def test_a_client_that_cannot_fill_a_batch_is_served_the_global_model():
    fed = run_tiny([Babu(fine_tune=2)], rounds=1)                # client 2 has five samples for batches of eight
    model, _ = fed.personal_model(2)
    assert all(torch.equal(model["params"][k], p) for k, p in fed.model["params"].items())


def test_the_head_alone_can_be_tuned():
    fed = run_tiny([Babu(fine_tune=2, tuned="head")], rounds=1)
    personal, _ = fed.personal_model(0)
    net = train_by_phases(fed, 0, fed.model, [("plain", ["head."], 2)], round_number=fed.round_number)
    close(personal["params"], net)
    for k, p in fed.model["params"].items():
        assert torch.equal(personal["params"][k], p) == (not k.startswith("head.")), k
