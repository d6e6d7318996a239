"""Description length: the arithmetic by hand, and what it must say of easy and of impossible labels."""

from __future__ import annotations

import math

import pytest
import torch

from consilience import rng
from consilience.errors import DataError
from consilience.metrics.mdl import Probe, code_lengths, curve_sizes, mdl

KEY = rng.key(0, "mdl test")
QUICK = {"points": 4, "seeds": 2}


def test_sizes_are_those_of_the_paper():
    assert curve_sizes(9000) == [10, 22, 46, 97, 206, 438, 933, 1985, 4227, 9000]
    assert curve_sizes(1000, 3) == [10, 100, 1000]                  # exact powers are not rounded up
    assert curve_sizes(20) == sorted(set(curve_sizes(20)))
    assert curve_sizes(20)[-1] == 20


def test_code_lengths_by_hand():
    # right endpoint 10·2 + 20·1 + 30·.5 = 55; prequential 10·ln 4 + 20·2 + 30·1 = 70 + 10 ln 4
    got = code_lengths([10, 30, 60], [2.0, 1.0, 0.5], 4)
    assert got["right_endpoint"] == pytest.approx(55.0)
    assert got["prequential"] == pytest.approx(70 + 10 * math.log(4))


def test_separable_features_are_cheap_and_random_labels_cost_a_uniform_code():
    y = torch.arange(300) % 4
    x = 3 * torch.nn.functional.one_hot(y, 8).float() + 0.1 * rng.normal(rng.key(1, "noise"), (300, 8))
    easy = mdl(x, y, 4, KEY, probe=Probe(steps=150, lr=1e-3, hidden=64), **QUICK)
    assert easy["coded"] == 270
    assert easy["right_endpoint"]["nats"] < 0.1 * easy["uniform_code"]["nats"]
    assert easy["prequential"]["nats"] > easy["right_endpoint"]["nats"]
    assert easy["right_endpoint"]["bits"] == pytest.approx(easy["right_endpoint"]["nats"] / math.log(2))
    # labels that features say nothing of: ln C per sample, and the probe's few small steps have learnt nothing yet
    random = rng.integers(rng.key(2, "labels"), 4, (300,))
    hard = mdl(x, random, 4, KEY, probe=Probe(steps=15, hidden=64), **QUICK)
    assert hard["right_endpoint"]["nats"] == pytest.approx(270 * math.log(4), rel=0.03)
    assert hard["uniform_code"]["nats"] == pytest.approx(270 * math.log(4))


def test_fixed_n_and_repeatability():
    y = torch.arange(200) % 2
    x = rng.normal(rng.key(3, "x"), (200, 3))
    first = mdl(x, y, 2, KEY, n=100, probe=Probe(steps=5, hidden=8), **QUICK)
    assert (first["samples"], first["coded"], first["validation"]) == (100, 90, 10)
    assert first == mdl(x, y, 2, KEY, n=100, probe=Probe(steps=5, hidden=8), **QUICK)
    assert first != mdl(x, y, 2, rng.key(9, "other"), n=100, probe=Probe(steps=5, hidden=8), **QUICK)
    with pytest.raises(DataError, match="300 samples were asked for, but there are 200"):
        mdl(x, y, 2, KEY, n=300)
    with pytest.raises(DataError, match="at least 23"):
        mdl(x[:20], y[:20], 2, KEY)


def test_one_scalar_mean_and_deviation():
    """A common shift and scale of all features changes nothing; standardising each dimension would also hide a scale of one."""
    y = torch.arange(100) % 2
    x = rng.normal(rng.key(4, "x"), (100, 3)).double()
    length = lambda features: mdl(features, y, 2, KEY, probe=Probe(steps=20, hidden=8, lr=1e-2), **QUICK)["right_endpoint"]["nats"]
    assert length(x * 7 + 100) == pytest.approx(length(x), rel=1e-4)
    assert length(x * torch.tensor([1.0, 1.0, 50.0])) != pytest.approx(length(x), rel=1e-4)


def test_probes_side_by_side_equal_torch_modules_one_by_one():
    """The batched probe is the plain MLP under plain Adam, from the same start on the same batches."""
    from consilience.metrics.mdl import _initial, _probe_losses
    x, y = rng.normal(rng.key(5, "x"), (40, 6)), torch.arange(40) % 3
    rows = torch.stack([torch.arange(10), torch.arange(10, 20)])
    probe = Probe(steps=12, hidden=16, lr=1e-2)
    got = _probe_losses(x, y, rows, slice(30, None), 3, probe, KEY)
    start = _initial((6, 16, 16, 3), 2, KEY, x.device)
    for seed in range(2):
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        with torch.no_grad():
            for layer, (w, b) in zip((net[0], net[2], net[4]), zip(start[::2], start[1::2])):
                layer.weight.copy_(w[seed].T)
                layer.bias.copy_(b[seed, 0])
        adam = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(12):
            adam.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows[seed]]), y[rows[seed]]).backward()
            adam.step()
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(net(x[30:]), y[30:])
        assert got[seed] == pytest.approx(float(expected), rel=1e-4)


def test_every_epoch_of_a_large_subset_passes_every_sample():
    from consilience.metrics.mdl import _Order
    order = _Order(KEY, 10)
    drawn = torch.cat([order.next(4) for _ in range(5)])            # two epochs of ten in batches of four
    assert drawn[:10].sort().values.tolist() == list(range(10))
    assert drawn[10:].sort().values.tolist() == list(range(10))
