"""Orders and batches: every sample at most once an epoch, and the sizes that were asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import rng
from consilience.core.part import Phase
from consilience.core.policy import Policy
from consilience.core.population import RowTable
from consilience.core.samples import ClientRows, Samples
from consilience.testing import tiny_population

MAIN = Phase("main", ())


def samples(size: int, **policy) -> Samples:
    population = replace(tiny_population((50,)), rows=(torch.arange(100, 100 + size),))
    return Samples(population, Policy(**policy), False, 0.0, torch.device("cpu"))


def batches(s: Samples, phases=(MAIN,), round_number=1):
    schedule = s.schedule(0, list(phases))
    sizes = [n for _, group in schedule for n in group]
    order = s.order(0, round_number, schedule)
    assert order.shape == (len(sizes), s.policy.batch)
    return [row[:n].tolist() for row, n in zip(order, sizes)]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["drop", "keep"]))
def test_every_sample_at_most_once_an_epoch(size, batch, epochs, last):
    made = batches(samples(size, batch=batch, epochs=epochs, last_batch=last))
    per_epoch = size // batch + (last == "keep" and size % batch > 0)
    assert len(made) == epochs * per_epoch
    for e in range(epochs):
        drawn = [row for b in made[e * per_epoch:(e + 1) * per_epoch] for row in b]
        assert len(set(drawn)) == len(drawn) == (size if last == "keep" else size - size % batch)
        assert set(drawn) <= set(range(100, 100 + size))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.sampled_from(["drop", "keep"]))
def test_steps_cross_the_borders_of_epochs(size, batch, steps, last):
    made = batches(samples(size, batch=batch, steps=steps, last_batch=last))
    if size < batch and last == "drop":
        assert made == []
        return
    assert len(made) == steps
    per_epoch = size // batch + (last == "keep" and size % batch > 0)
    for start in range(0, steps, per_epoch):
        drawn = [row for b in made[start:start + per_epoch] for row in b]
        assert len(set(drawn)) == len(drawn)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 5))
def test_replacement_draws_full_batches_from_own_samples(size, batch, steps):
    made = batches(samples(size, batch=batch, steps=steps, sampling="replacement"))
    assert [len(b) for b in made] == [batch] * steps
    assert {row for b in made for row in b} <= set(range(100, 100 + size))


def test_replacement_repeats():
    drawn = [row for b in batches(samples(10, batch=10, steps=20, sampling="replacement")) for row in b]
    assert any(len(set(drawn[i:i + 10])) < 10 for i in range(0, 200, 10))
    assert set(drawn) == set(range(100, 110))


def test_an_epoch_of_a_small_client_with_replacement_is_one_batch():
    assert [len(b) for b in batches(samples(3, batch=8, sampling="replacement"))] == [8]
    assert batches(samples(0, batch=8, sampling="replacement")) == []


def test_a_last_batch_too_small_for_the_model_is_dropped():
    s = samples(17, batch=8, last_batch="keep")
    s.smallest = 2
    assert [len(b) for b in batches(s)] == [8, 8]
    s.smallest = 1
    assert [len(b) for b in batches(s)] == [8, 8, 1]


def test_orders_differ_by_round_epoch_and_phase_and_are_keyed():
    s = samples(32, batch=32, epochs=2)
    first, second = batches(s)
    assert first != second
    assert batches(s) == [first, second]
    assert batches(s, round_number=2) != [first, second]
    assert batches(s, phases=[Phase("other", ())]) != [first, second]
    assert batches(samples(32, batch=32, epochs=2, seed=1)) != [first, second]


def test_phases_with_their_own_epochs():
    s = samples(16, batch=8, steps=3)
    assert [len(g) for _, g in s.schedule(0, [Phase("head", (), epochs=2), MAIN])] == [4, 3]     # steps hold for the run's own work
    assert s.longest([Phase("head", (), epochs=2), MAIN]) == 7


@given(st.integers(0, 60), st.floats(0, 0.9), st.integers(0, 50))
def test_holding_back_splits_a_clients_samples(size, share, seed):
    table = RowTable.of([torch.arange(7), torch.arange(size) + 7])
    each = ClientRows(table, seed, share)
    rows = each[1]
    assert len(rows.reserved) == int(size * share)
    assert len(rows.train) == each.size_of(1) == each.left(size)
    assert each.different_sizes == [each.left(n) for n in sorted({7, size})]
    assert each.sizes_of([1, 0, 1]) == [each.size_of(i) for i in (1, 0, 1)]
    assert each.sizes_of([]) == []
    assert sorted([*rows.train.tolist(), *rows.reserved.tolist()]) == list(range(7, size + 7))
    assert rows.train.tolist() == sorted(rows.train.tolist())


def test_nothing_held_back_is_the_clients_own_order():
    own = torch.tensor([4, 2, 9])
    assert torch.equal(ClientRows(RowTable.of([own]), 1, 0.0)[0].train, own)


def test_evaluation_batches_cover_everything_in_order():
    s = samples(0, eval_batch=7)
    rows = torch.arange(20)
    assert [len(x) for x, _ in s.batches(rows)] == [7, 7, 6]
    assert torch.equal(torch.cat([y for _, y in s.batches(rows)]), s.y[:20])


def test_batches_joined_for_a_pass_over_a_client(monkeypatch: pytest.MonkeyPatch):
    s = samples(0, eval_batch=3)
    rows, one = torch.arange(20), s.x[0].numel()
    sizes = lambda: [len(x) for x, _ in s.batches(rows, joined=True)]
    assert sizes() == [3] * 6 + [2]                       # on a CPU none are
    s.several = 4
    assert sizes() == [12, 8]
    assert [len(x) for x, _ in s.batches(rows)] == [3] * 6 + [2]
    assert torch.equal(torch.cat([y for _, y in s.batches(rows, joined=True)]), s.y[:20])
    monkeypatch.setattr("consilience.core.samples.AT_ONCE", 5 * one)
    assert sizes() == [5] * 4
    monkeypatch.setattr("consilience.core.samples.AT_ONCE", one)      # large samples: as in evaluation
    assert sizes() == [3] * 6 + [2]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [{"epochs": 3, "last_batch": "keep"}, {"steps": 700}, {"steps": 700, "sampling": "replacement"}])
def test_orders_drawn_on_a_gpu_are_those_of_the_host(policy):
    """Long ones are drawn there, short ones on the host; both are the same."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for size in (30, 5003):
        here = samples(size, batch=10, **policy)
        population = replace(tiny_population((50,)), rows=here.rows.table.rows[None].unbind())
        there = Samples(population, here.policy, False, 0.0, torch.device("cuda"))
        orders = [s.order(0, 2, s.schedule(0, [MAIN])).cpu() for s in (here, there)]
        assert torch.equal(*orders)


def test_an_order_is_that_of_single_permutations():
    """Epoch e is own[permutation(key(e))], cut into batches; what a last batch leaves over is the first sample."""
    s = samples(7, batch=3, epochs=2, last_batch="keep")
    own, key = s.rows[0].train, rng.key(s.policy.seed, "order", 0, 4, "main")
    epochs = [torch.cat([own[rng.permutation(rng.key(key, e), 7)], own[:1], own[:1]]).reshape(3, 3) for e in range(2)]
    assert torch.equal(s.order(0, 4, s.schedule(0, [MAIN])), torch.cat(epochs))
