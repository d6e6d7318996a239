"""Reductions of uploads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.part import Part
from consilience.core.server import REDUCTIONS, reduce_uploads
from consilience.errors import ConfigError

numbers = st.floats(-100, 100, width=32)
clients = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6)


@dataclass(frozen=True)
class Uploads(Part):
    name = "uploads"
    reduce = {"s": "sum", "m": "mean", "w": "weighted", "k": "stack", "c": "concat"}


def shares(n: int) -> torch.Tensor:
    sizes = torch.arange(1, n + 1).float()
    return sizes / sizes.sum()


def test_by_hand():
    uploads = [{"s": torch.tensor([1.0, 2]), "m": {"in": torch.tensor(1.0)}, "w": torch.tensor(2.0), "k": torch.tensor([1]),
                "c": torch.tensor([1, 2])},
               {"s": torch.tensor([3.0, 4]), "m": {"in": torch.tensor(4.0)}, "w": torch.tensor(6.0), "k": torch.tensor([2]),
                "c": torch.tensor([3])}]
    out = reduce_uploads(Uploads(), uploads, torch.tensor([0.25, 0.75]))
    assert out["s"].tolist() == [4, 6]
    assert out["m"]["in"].item() == 2.5
    assert out["w"].item() == 0.25 * 2 + 0.75 * 6
    assert out["k"].tolist() == [[1], [2]]
    assert out["c"].tolist() == [1, 2, 3]


def test_undeclared_reduction():
    with pytest.raises(ConfigError, match="'uploads' uploads 'z' but declares no reduction"):
        reduce_uploads(Uploads(), [{"z": torch.zeros(1)}], torch.ones(1))


@pytest.mark.parametrize(("upload", "how"), [({"w": torch.tensor([3])}, "weighted"), ({"m": {"in": torch.tensor(True)}}, "mean")])
def test_whole_numbers_have_no_average(upload, how):
    """Weights of 0.25 and 0.75 are 0 as whole numbers, and so the weighted average of 3 and 3 was 0."""
    with pytest.raises(ConfigError, match=rf"'uploads' uploads .* as whole numbers .*, of which {how!r} makes no average. .*\.float\(\)"):
        reduce_uploads(Uploads(), [upload, upload], torch.tensor([0.25, 0.75]))


@pytest.mark.parametrize("other", [{}, {"s": torch.ones(2), "m": torch.ones(2)}, {"s": {"inner": torch.ones(2)}}])
@pytest.mark.parametrize("turned", [False, True])
def test_clients_upload_the_same_things(other, turned):
    """What only some of them had would be lost without a word, or end in a KeyError."""
    uploads = [{"s": torch.ones(2)}, other]
    with pytest.raises(ConfigError, match=r"from one client and .* from another"):
        reduce_uploads(Uploads(), uploads[::-1] if turned else uploads, torch.tensor([0.5, 0.5]))


@given(st.lists(numbers, min_size=1, max_size=5), st.integers(1, 6))
def test_weighted_and_mean_of_equal_trees_is_the_tree(values, n):
    x = torch.tensor(values)
    for how in ("weighted", "mean"):
        torch.testing.assert_close(REDUCTIONS[how]([x] * n, shares(n)), x, rtol=1e-5, atol=1e-5)


@given(clients)
def test_sums_do_not_care_for_the_order_but_stacks_keep_it(values):
    xs = [torch.tensor(v) for v in values]
    p = shares(len(xs))
    backwards = list(range(len(xs) - 1, -1, -1))
    for how in ("sum", "mean", "weighted"):
        a = REDUCTIONS[how](xs, p)
        b = REDUCTIONS[how]([xs[i] for i in backwards], p[torch.tensor(backwards)])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert torch.equal(REDUCTIONS["stack"](xs, p)[0], xs[0])
    assert torch.equal(REDUCTIONS["stack"](xs[::-1], p)[-1], xs[0])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_concat_keeps_every_row_in_order(lengths):
    xs = [torch.full((n, 2), float(i)) for i, n in enumerate(lengths)]
    out = REDUCTIONS["concat"](xs, shares(len(xs)))
    assert out.shape == (sum(lengths), 2)
    assert out[:, 0].tolist() == [float(i) for i, n in enumerate(lengths) for _ in range(n)]
