"""Whole clients that are not trained on."""

from __future__ import annotations

import pytest
import torch

from consilience import rng
from consilience.data.federated import ClientRows, FederatedData
from consilience.data.splits import draw_clients, hold_out, leave_one_out
from consilience.errors import ConfigError


@pytest.fixture
def data():
    cut = lambda i: ClientRows(f"site{i}", torch.arange(4 * i, 4 * i + 2), torch.tensor([4 * i + 2]), torch.tensor([4 * i + 3]))
    clients = tuple(map(cut, range(4)))
    return FederatedData("sites", torch.zeros(16, 1), torch.arange(16) % 2, 2, clients, description={"split": "by_group"})


def test_hold_out_by_number_and_name(data):
    train, held = hold_out(data, [1, "site3"])
    assert [c.name for c in train.clients] == ["site0", "site2"]
    assert [c.name for c in held.clients] == ["site1", "site3"]
    assert held.clients[0].train.tolist() == [4, 5]
    assert train.description == {"split": "by_group", "held_out": ["site1", "site3"], "clients": "trained on"}
    assert data.description == {"split": "by_group"}                            # the original is as it was
    assert train.x.data_ptr() == data.x.data_ptr()                              # samples are shared, not copied
    assert len({d.split_hash() for d in (data, train, held)}) == 3


def test_leave_one_out_holds_each_out_once(data):
    found = [(name, [c.name for c in rest.clients], [c.name for c in own.clients]) for name, rest, own in leave_one_out(data)]
    assert [f[0] for f in found] == ["site0", "site1", "site2", "site3"]
    for name, rest, own in found:
        assert own == [name]
        assert sorted([*rest, name]) == ["site0", "site1", "site2", "site3"]


def test_new_participants_are_drawn_from_the_key(data):
    drawn = [tuple(draw_clients(data, 2, rng.key(seed))) for seed in range(40)]
    assert drawn == [tuple(draw_clients(data, 2, rng.key(seed))) for seed in range(40)]
    assert all(len(set(d)) == 2 and list(d) == sorted(d) for d in drawn)
    assert len(set(drawn)) == 6                                                 # every pair of four occurs


def test_refusals(data):
    with pytest.raises(ConfigError, match="Did you mean 'site1'"):
        hold_out(data, ["site 1"])
    with pytest.raises(ConfigError, match="clients 0 to 3"):
        hold_out(data, [4])
    with pytest.raises(ConfigError, match="none is left"):
        hold_out(data, [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="No client"):
        hold_out(data, [])
    with pytest.raises(ConfigError, match="1 to 3"):
        draw_clients(data, 4, rng.key(0))
