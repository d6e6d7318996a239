"""The sequential engine against an ordinary loop, and what it keeps between clients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from plain_loop import PlainLoop
from torch import Tensor, nn

from consilience import tree
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines import Sequential
from consilience.parts.babu import Babu
from consilience.parts.mr import Mr
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.testing import tiny_federation, tiny_population

SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-3)
ABLE = [0, 1, 3]                                                 # client 2 has five samples for batches of eight


def test_prox_and_scaffold_with_momentum_decay_and_batchnorm():
    fed = tiny_federation([Prox(mu=0.1), Scaffold()])
    loop = PlainLoop(fed, SGD)
    zeros = {k: torch.zeros_like(p) for k, p in loop.server.named_parameters()}
    c, own, new = zeros, {}, {}

    def pull(net, received):
        return 0.05 * sum((p - received[k]).square().sum() for k, p in net.named_parameters())

    def correct(i, net, received):
        for k, p in net.named_parameters():
            p.grad += c[k] - own.get(i, zeros)[k]

    def ended(i, net, received):
        n, r = len(loop.batches(i)), 0.9
        length = 0.05 * (n - r * (1 - r**n) / (1 - r)) / (1 - r)
        new[i] = {k: own.get(i, zeros)[k] - c[k] + (received[k] - p.detach()) / length for k, p in net.named_parameters()}

    for cohort in (ABLE, [0, 3], ABLE):
        new.clear()
        loop.round(cohort, pull, correct, ended)
        c = {k: c[k] + sum(new[i][k] - own.get(i, zeros)[k] for i in cohort) / 4 for k in c}       # N = 4
        own.update(new)
        fed.round(cohort)
    assert loop.distance() < 1e-5
    for k, v in c.items():
        torch.testing.assert_close(fed.shared["scaffold"]["c"][k], v, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("settings", "reference"), [
    ({}, {}),
    ({"weights": "samples"}, {"by_samples": True}),
    ({"last_batch": "keep", "weights": "samples"}, {"by_samples": True}),
    ({"optimiser_state": "kept"}, {"keep": True}),
    ({"schedule": "exponential(gamma=0.5)"}, {"lr": lambda r: 0.05 * 0.5 ** (r - 1)}),
    ({"schedule": "step(every=2, gamma=0.1)", "optimiser_state": "kept"}, {"keep": True, "lr": lambda r: 0.05 if r < 3 else 0.005}),
    ({"steps": 7}, {}),
    ({"steps": 4, "last_batch": "keep"}, {}),
    ({"sampling": "replacement"}, {}),
    ({"sampling": "replacement", "steps": 5, "epochs": 1}, {}),
], ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items() if not callable(x)) or "plain")
def test_fedavg_with_sgd(settings, reference):
    fed = tiny_federation(**settings)
    loop = PlainLoop(fed, SGD, **reference)
    able = [i for i in range(4) if fed.samples.schedule(i, fed.phases)]
    for _ in range(3):
        losses = loop.round(able)
        report = fed.round()
        for i, expected in losses.items():
            assert report.losses[i] == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert loop.distance() < 1e-5


class Smooth(nn.Module):
    """No BatchNorm: a bias before it has a gradient of rounding errors only, which Adam turns into steps of full size."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(x))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_fedavg_with_adam(kept, weight_decay):
    policy = Policy(optimiser="adam", lr=0.003, weight_decay=weight_decay, optimiser_state="kept" if kept else "reset", batch=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Smooth()
    fed = Federation(module, Layout(), Method(), tiny_population(), policy, Sequential)
    loop = PlainLoop(fed, partial(torch.optim.Adam, weight_decay=weight_decay), keep=kept, by_samples=True, lr=lambda r: 0.003, net=Smooth)
    for _ in range(3):
        loop.round(ABLE)
        fed.round()
    assert loop.distance() < 1e-5


def test_kept_optimiser_state_differs_from_reset():
    fed = tiny_federation(optimiser_state="kept")
    loop = PlainLoop(fed, SGD)                                   # resets
    for _ in range(2):
        loop.round(ABLE)
        fed.round()
    assert loop.distance() > 1e-4


def test_partial_batches_are_kept_whole():
    fed = tiny_federation(last_batch="keep", epochs=1)
    assert [n for _, s in fed.samples.schedule(1, fed.phases) for n in s] == [8, 8]         # 17 = 8 + 8 + 1: one is too few for BatchNorm
    assert [n for _, s in fed.samples.schedule(2, fed.phases) for n in s] == [5]
    assert fed.round().idle == []


def test_one_slot_for_each_kind_of_work():
    fed = tiny_federation([Babu(fine_tune=1), Mr()])
    fed.round()
    fed.personal_model(0)
    assert isinstance(fed.engine, Sequential)
    assert set(fed.engine.slots) == {"round", "plain1"}
    before = {k: {p: t.data_ptr() for p, t in tree.paths(s.written())} for k, s in fed.engine.slots.items()}
    fed.round()
    fed.personal_model(1)
    after = {k: {p: t.data_ptr() for p, t in tree.paths(s.written())} for k, s in fed.engine.slots.items()}
    assert after == before                                       # addresses never change, so that steps can be captured


def test_results_come_in_the_order_of_the_works():
    fed = tiny_federation()
    a = fed.round([3, 0, 1])
    b = tiny_federation().round([0, 1, 3])
    assert a.losses == b.losses
    assert list(a.losses) == [0, 1, 3]
