"""The weighted change of a model, and counters."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.aggregate import merge_counters, weighted_change

numbers = st.floats(-100, 100, width=32)
clients = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6)


def shares(n: int) -> torch.Tensor:
    sizes = torch.arange(1, n + 1).float()
    return sizes / sizes.sum()


@given(clients, numbers)
def test_weighted_change_is_the_naive_mean(values, start):
    model = {"a": torch.tensor([start, 0.0]), "b": torch.tensor([[1.0]])}
    trained = [{"a": torch.tensor(v), "b": torch.tensor([[v[0]]])} for v in values]
    p = shares(len(values))
    change = weighted_change(model, trained, p)
    for k, w in model.items():
        naive = sum(share.double() * t[k].double() for share, t in zip(p, trained)) - w.double() * p.double().sum()
        torch.testing.assert_close(change[k].double(), naive, rtol=1e-4, atol=1e-3)


def test_weighted_change_leaves_its_arguments_alone():
    model, trained = {"a": torch.zeros(2)}, [{"a": torch.ones(2)}, {"a": torch.ones(2)}]
    weighted_change(model, trained, shares(2))
    assert torch.equal(model["a"], torch.zeros(2))
    assert torch.equal(trained[0]["a"], torch.ones(2))
    assert weighted_change({}, [{}, {}], shares(2)) == {}


def test_counters_take_the_largest():
    assert merge_counters([torch.tensor([3, 9]), torch.tensor([5, 1])]).tolist() == [5, 9]
