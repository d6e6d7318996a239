"""Description length: the arithmetic by hand, and what it must say of easy and of impossible labels."""

from __future__ import annotations

import math

import pytest
import torch

from consilience import rng
from consilience.errors import DataError
from consilience.metrics.mdl import Probe, code_lengths, curve_sizes, mdl
from consilience.metrics.probes import Order, Task, fit_together, initial, train_probes

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


def _one_by_one(x, y, task, classes, probe, held):
    """A plain MLP under plain Adam; permutations drawn one at a time, batches cut from them as they come."""
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], probe.hidden), torch.nn.ReLU(), torch.nn.Linear(probe.hidden, probe.hidden),
                              torch.nn.ReLU(), torch.nn.Linear(probe.hidden, classes))
    start = initial(probe.widths(x.shape[1], classes), [task], x.device)
    with torch.no_grad():
        for layer, (w, b) in zip((net[0], net[2], net[4]), zip(start[::2], start[1::2])):
            layer.weight.copy_(w[0].T)
            layer.bias.copy_(b[0, 0])
    adam = torch.optim.Adam(net.parameters(), lr=probe.lr)
    left, epoch = torch.zeros(0, dtype=torch.int64), 0
    for _ in range(probe.steps):
        drawn = torch.arange(task.size)
        if task.size > probe.batch:
            while len(left) < probe.batch:
                left = torch.cat([left, rng.permutation(rng.key(rng.key(task.key, "order", task.seed), epoch), task.size)])
                epoch += 1
            drawn, left = left[:probe.batch], left[probe.batch:]
        rows = task.rows[drawn]
        adam.zero_grad()
        torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        adam.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net(x[held]).double(), y[held]))


@pytest.mark.parametrize("together", [1, 3, 100])
def test_probes_trained_at_once_equal_torch_modules_one_by_one(together):
    """Whole subsets of several sizes, filled up to the largest where they share a step, and drawn batches of several sizes. Within 1e-4."""
    x, y = rng.normal(rng.key(5, "x"), (60, 6)), torch.arange(60) % 3
    probe = Probe(steps=150, batch=16, hidden=16, lr=1e-2)                        # more steps than are drawn ahead
    tasks = [Task(size, seed, rng.permutation(rng.key(KEY, "rows", seed, size), 50)[:size], rng.key(KEY, "probe", size))
             for size in (5, 10, 16, 20, 33) for seed in range(2)]
    got = {t.name: loss for t, loss in train_probes(x, y, tasks, slice(50, None), 3, probe, together)}
    assert list(got) == [t.name for t in tasks]
    for task in tasks:
        assert got[task.name] == pytest.approx(_one_by_one(x, y, task, 3, probe, slice(50, None)), rel=1e-4), task.name


def test_bfloat16_products_stay_near():
    y = torch.arange(300) % 4
    x = 2 * torch.nn.functional.one_hot(y, 8).float() + rng.normal(rng.key(6, "noise"), (300, 8))
    exact, rough = (mdl(x, y, 4, KEY, probe=Probe(steps=100, lr=1e-3, hidden=64, precision=kind), **QUICK)["right_endpoint"]["nats"]
                    for kind in ("float32", "bfloat16"))
    assert rough == pytest.approx(exact, rel=0.01)
    assert rough != exact


def test_a_measure_that_was_stopped_goes_on_with_the_next_probe():
    y = torch.arange(200) % 2
    x = rng.normal(rng.key(3, "x"), (200, 3))
    probe, found, saved, steps = Probe(steps=5, hidden=8), dict[str, float](), list[int](), list[int]()
    whole = mdl(x, y, 2, KEY, n=100, probe=probe, together=1, tell=lambda done, of: steps.append(done), **QUICK)
    assert steps == [0, 5, 10, 15, 20, 25, 30, 35, 40]                            # four sizes, two seeds, five steps each

    class Stop(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done == 20:
            raise Stop
    with pytest.raises(Stop):
        mdl(x, y, 2, KEY, n=100, probe=probe, together=1, tell=stop, found=found, keep=lambda: saved.append(len(found)), **QUICK)
    assert saved == [1, 2, 3]                                                     # the fourth was under way
    steps.clear()
    assert mdl(x, y, 2, KEY, n=100, probe=probe, together=1, tell=lambda done, of: steps.append(done), found=found, **QUICK) == whole
    assert steps == [15, 20, 25, 30, 35, 40]


def test_every_epoch_of_a_large_subset_passes_every_sample():
    order = Order(KEY, 10)
    drawn = torch.cat([order.next(4) for _ in range(5)])            # two epochs of ten in batches of four
    assert drawn[:10].sort().values.tolist() == list(range(10))
    assert drawn[10:].sort().values.tolist() == list(range(10))
    assert drawn[:10].tolist() == rng.permutation(rng.key(KEY, 0), 10).tolist()
    assert Order(KEY, 10).next(20).tolist() == drawn.tolist()       # however many are drawn at once


def test_what_fits_on_a_device():
    probe = Probe()
    assert fit_together(512, 10, probe, torch.device("cpu")) == 1
    # 512·512 + 512 + 512·512 + 512 + 512·10 + 10 = 530,442 weights, four numbers each; 256 rows of 512 + 4·512 + 2·128 = 2816 numbers:
    # 4·530,442 + 256·2816 = 2,842,664 numbers of four bytes, and 2^32 // 11,370,656 = 377
    assert fit_together(512, 10, probe, torch.device("cuda")) == 377
    assert fit_together(10 ** 8, 10, probe, torch.device("cuda")) == 1
