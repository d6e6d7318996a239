"""FedPer: the head stays at home, and all trains together."""

from __future__ import annotations

import torch
from phase_loop import close, train_by_phases

from consilience.parts.per import Per
from consilience.testing import run_tiny, tiny_federation

EVERYTHING = ["stage1", "neck", "header", "head"]


def test_joint_training_with_a_head_of_ones_own():
    fed = run_tiny([Per()], rounds=1)
    start = fed.received(fed.client(0))
    net = train_by_phases(fed, 0, start, [("main", EVERYTHING, 2)])
    fed.round([0])
    close({k: v for half in fed.model.values() for k, v in half.items() if not k.startswith("head.")}, net)
    close(fed.client(0).tensors["local"], net)


def test_the_servers_head_never_moves():
    fed, start = run_tiny([Per()]), tiny_federation().model["params"]
    assert torch.equal(fed.model["params"]["head.weight"], start["head.weight"])
    assert not torch.equal(fed.model["params"]["neck.1.weight"], start["neck.1.weight"])
    heads = [fed.client(i).tensors["local"]["head.weight"] for i in (0, 1, 3)]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert fed.no_global_model == "a part of the model never leaves the clients"


def test_a_client_is_served_by_the_shared_base_and_its_own_head():
    fed = run_tiny([Per()])
    model, _ = fed.personal_model(1)
    assert torch.equal(model["params"]["head.bias"], fed.client(1).tensors["local"]["head.bias"])
    assert torch.equal(model["params"]["neck.1.weight"], fed.model["params"]["neck.1.weight"])


def test_the_header_travels():
    # the head is the layout's head alone: header and extractor are shared
    fed = tiny_federation([Per()])
    assert fed.model["params"].keys() - fed.spec.shared == {"head.weight", "head.bias"}
