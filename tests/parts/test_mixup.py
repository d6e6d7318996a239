"""Mixup: its draws, its smaller last batch, and the loss against two ordinary cross-entropies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import ONE, check_step

from consilience import rng
from consilience.parts.mixup import Mixup
from consilience.testing import tiny_federation

SPEC = tiny_federation().spec                                  # batch 8


def plan_of(fed, number):
    key = rng.key(fed.policy.seed, "plan", number, fed.round_number + 1, "round", "mixup")
    schedule = fed.samples.schedule(number, fed.phases)
    return Mixup(alpha=1.0).plan(key, fed.spec, torch.tensor([n for _, sizes in schedule for n in sizes]))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 1000))
@settings(deadline=None)
def test_every_batch_is_permuted_within_itself(sizes, seed):
    order = Mixup(alpha=0.2).plan(rng.key(seed), SPEC, torch.tensor(sizes))["order"]
    for row, size in zip(order, sizes):
        assert sorted(row[:size].tolist()) == list(range(size))


def test_lambda_follows_the_beta_distribution():
    # Beta(α, α): mean ½, variance 1/(4(2α + 1)); α = 0.5 gives 1/8. With 4000 draws the mean's standard error is 0.0056.
    weight = Mixup(alpha=0.5).plan(rng.key(3), SPEC, torch.full((4000,), 8))["weight"]
    assert weight.mean().item() == pytest.approx(0.5, abs=0.025)
    assert weight.var().item() == pytest.approx(1 / 8, abs=0.01)
    assert Mixup(alpha=0.0).plan(rng.key(3), SPEC, torch.full((5,), 8))["weight"].tolist() == [1.0] * 5


@pytest.mark.parametrize("sizes", [(24, 17, 5, 40), (5, 17, 5, 40)])          # a full batch, and a smaller last one
def test_loss_is_the_mixture_of_two_cross_entropies(sizes):
    # Cross-entropy is linear in the target: CE(λy + (1−λ)y') = λCE(y) + (1−λ)CE(y').
    fed = tiny_federation([Mixup(alpha=1.0)], sizes=sizes, last_batch="keep", **ONE)
    plan = plan_of(fed, 0)
    size = min(8, sizes[0])
    lam, other = float(plan["weight"][0]), plan["order"][0][:size]
    assert 0.02 < lam < 0.98
    assert other.tolist() != list(range(size))

    def task(net, x, y):
        logits = net(lam * x + (1 - lam) * x[other])
        return lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[other])
    check_step(fed, 0, task=task)


def test_draws_differ_between_steps_rounds_and_clients():
    fed = tiny_federation([Mixup(alpha=1.0)])
    draws = [plan_of(fed, i)["weight"] for i in (0, 3)]
    assert len({float(w) for d in draws for w in d}) == sum(map(len, draws))
    before = draws[0]
    fed.round([0])
    assert not torch.equal(plan_of(fed, 0)["weight"], before)
