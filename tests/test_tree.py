"""Trees: structure kept, arguments untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import tree

names = st.text(alphabet="abcd.", min_size=1, max_size=4)
leaves = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=4).map(torch.tensor)
trees = st.recursive(st.dictionaries(names, leaves, min_size=1, max_size=4),
                     lambda inner: st.dictionaries(names, st.one_of(leaves, inner), min_size=1, max_size=3), max_leaves=8)
flats = st.dictionaries(names, st.tuples(leaves, st.floats(-10, 10, width=32)), min_size=1, max_size=4)


def same(a, b):
    pa, pb = dict(tree.paths(a)), dict(tree.paths(b))
    return pa.keys() == pb.keys() and all(torch.equal(pa[k], pb[k]) for k in pa)


@given(trees)
def test_paths_and_nested_are_inverse(t):
    flat = dict(tree.paths(t))
    assert len(flat) == len(tree.leaves(t))
    back = tree.nested(flat)
    assert same(back, t)
    assert dict(tree.paths(back)) == flat


@given(trees)
def test_clone_shares_no_memory(t):
    copy = tree.clone(t)
    assert same(copy, t)
    assert not {x.data_ptr() for x in tree.leaves(copy)} & {x.data_ptr() for x in tree.leaves(t)}
    for x in tree.leaves(copy):
        x.add_(1)
    assert not same(copy, t)


@given(trees)
def test_zeros_and_bytes(t):
    assert all((x == 0).all() for x in tree.leaves(tree.zeros(t)))
    assert tree.count_bytes(t) == sum(4 * x.numel() for x in tree.leaves(t))
    assert tree.count_bytes({}) == 0


@given(trees)
def test_copy_into_overwrites_in_place(t):
    target = tree.zeros(t)
    addresses = [x.data_ptr() for x in tree.leaves(target)]
    tree.copy_into(target, t)
    assert same(target, t)
    assert [x.data_ptr() for x in tree.leaves(target)] == addresses


def test_copy_into_refuses_other_trees():
    with pytest.raises(KeyError, match="b"):
        tree.copy_into({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)})


@given(flats)
def test_add_sub_and_scale(pairs):
    a, b = {k: x for k, (x, _) in pairs.items()}, {k: torch.full_like(x, c) for k, (x, c) in pairs.items()}
    before = tree.clone(a)
    total = tree.add(a, b)
    for k in a:
        torch.testing.assert_close(total[k], a[k] + b[k])
        torch.testing.assert_close(tree.sub(total, b)[k], a[k], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(tree.add(a, b, -0.5)[k], a[k] - 0.5 * b[k])
        torch.testing.assert_close(tree.scale(a, 3.0)[k], 3 * a[k])
        torch.testing.assert_close(tree.scale(a, torch.tensor(3.0))[k], 3 * a[k])
    assert same(a, before)


@given(flats)
def test_distance_and_norm(pairs):
    a, b = {k: x for k, (x, _) in pairs.items()}, {k: torch.full_like(x, c) for k, (x, c) in pairs.items()}
    naive = sum((a[k] - b[k]).double().square().sum().item() for k in a)
    assert float(tree.sq_dist(a, b)) == pytest.approx(naive, rel=1e-4, abs=1e-3)
    assert float(tree.norm(a)) == pytest.approx(sum(x.double().square().sum().item() for x in a.values()) ** 0.5, rel=1e-4, abs=1e-5)


def test_gradient_of_the_distance_reaches_the_first_argument_only():
    a, b = {"w": torch.tensor([3.0, 1.0], requires_grad=True)}, {"w": torch.tensor([1.0, 1.0], requires_grad=True)}
    (0.5 * tree.sq_dist(a, b)).backward()
    assert a["w"].grad.tolist() == [2.0, 0.0]                     # w − b
    assert b["w"].grad is None


def test_distance_is_over_the_first_arguments_keys():
    assert float(tree.sq_dist({"a": torch.tensor([2.0])}, {"a": torch.tensor([0.0]), "b": torch.tensor([9.0])})) == 4.0
    assert tree.sq_dist({}, {}) == 0.0


def test_squared_distance_has_a_second_derivative():
    """f = ‖a − b‖², ∇f = 2(a − b), so a penalty ‖∇f‖² = 4‖a − b‖² has the gradient 8(a − b); it used to be zero without a word."""
    a, b = {"w": torch.tensor([3.0, -1.0], requires_grad=True)}, {"w": torch.tensor([1.0, 1.0])}
    slope, = torch.autograd.grad(tree.sq_dist(a, b), a["w"], create_graph=True)
    assert slope.tolist() == [4.0, -4.0]
    assert torch.autograd.grad(slope.square().sum(), a["w"])[0].tolist() == [16.0, -16.0]
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: tree.sq_dist({"w": x.square()}, {"w": torch.ones(2, dtype=torch.float64)}), x)


def test_add_where_leaves_other_keys():
    a, b = {"x": torch.tensor([1.0]), "y": torch.tensor([2.0])}, {"y": torch.tensor([5.0]), "z": torch.tensor([7.0])}
    out = tree.add_where(a, b)
    assert {k: v.item() for k, v in out.items()} == {"x": 1.0, "y": 7.0}
    assert tree.add_where(a, {}) is a


def test_empty_flats():
    assert tree.add({}, {}) == tree.sub({}, {}) == tree.scale({}, 2.0) == tree.pick({}, ()) == {}


def test_all_finite():
    assert bool(tree.all_finite({"a": torch.zeros(2), "n": torch.tensor(3)}))
    assert bool(tree.all_finite({"n": torch.tensor(3)}))
    assert bool(tree.all_finite({}))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not bool(tree.all_finite({"a": torch.zeros(2), "b": {"c": torch.tensor([1.0, bad])}}))
    assert not bool(tree.all_finite({"a": torch.tensor([float("inf"), -float("inf")])}))      # their sum is NaN
    # 3e38 + 3e38 is beyond float32, but each number is finite
    assert bool(tree.all_finite({"a": torch.tensor([3e38, 3e38])}))
    assert not bool(tree.all_finite({"a": torch.tensor([3e38, 3e38]), "b": torch.tensor(float("nan"))}))


@given(trees)
def test_map_walks_trees_together(t):
    doubled = tree.map(lambda x, y: x + y, t, t)
    assert same(doubled, tree.map(lambda x: 2 * x, t))


def test_tensors_that_travel_together_arrive_as_they_were():
    tensors = [torch.tensor(0.5), torch.tensor(True), torch.arange(7), torch.tensor([[1.5, 2.5], [3.5, 4.5]]).t(),
               torch.tensor([1, 2, 3]).to(torch.uint8)]
    arrived = tree.send_together(tensors, torch.device("cpu"))
    for t, a in zip(tensors, arrived):
        assert t.dtype == a.dtype
        assert torch.equal(t, a)


@pytest.mark.gpu
def test_copies_from_the_host_reach_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    source = {"lr": torch.tensor(0.5), "first": torch.tensor(True), "index": torch.arange(12).reshape(4, 3), "large": torch.rand(1 << 15),
              "there": torch.rand(5).cuda(), "t": torch.rand(4, 6).t()}
    target = tree.map(lambda t: torch.zeros_like(t, device="cuda"), source)
    tree.copy_into(target, source)
    assert all(torch.equal(target[k].cpu(), source[k].cpu()) for k in source)
