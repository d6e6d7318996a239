"""Keyed randomness: ranges, independence of keys, and the quality of the numbers for fixed keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import rng
from consilience.kernels import hashing

seeds = st.integers(0, 2**63 - 1)
words = st.lists(st.one_of(st.text(alphabet="abcxyz", min_size=1, max_size=6), st.integers(0, 10**6)), max_size=4)


@given(seeds, words)
def test_uniform_lies_strictly_inside(seed, names):
    u = rng.uniform(rng.key(seed, *names), (500,))
    assert u.min() > 0
    assert u.max() < 1
    assert u.dtype == torch.float32


def test_uniform_at_its_ends(monkeypatch):
    # all bits 0 and all bits 1: 0.5/2²³ and 1 − 0.5/2²³, both exact in float32
    monkeypatch.setattr(rng, "bits", lambda key, n: torch.tensor([0, -1]))
    assert rng.uniform(rng.key(0), (2,)).tolist() == [0.5 / 2**23, 1 - 0.5 / 2**23]
    assert rng.normal(rng.key(0), (1,)).isfinite().all()


@given(seeds, st.integers(0, 300))
def test_permutation_is_a_permutation(seed, n):
    assert sorted(rng.permutation(rng.key(seed, "p"), n).tolist()) == list(range(n))


@given(seeds, st.integers(1, 1000))
def test_integers_stay_in_range(seed, below):
    drawn = rng.integers(rng.key(seed), below, (7, 5))
    assert drawn.shape == (7, 5)
    assert drawn.min() >= 0
    assert drawn.max() < below


@given(seeds, words, words)
def test_keys_of_different_words_differ(seed, a, b):
    same = "/".join(map(str, a)) == "/".join(map(str, b))
    assert (rng.key(seed, *a) == rng.key(seed, *b)).item() is same


@given(seeds, seeds)
def test_keys_of_different_seeds_differ(a, b):
    assert (rng.key(a, "w") == rng.key(b, "w")).item() is (a == b)


@given(seeds, st.integers(0, 10**6), st.integers(0, 10**6))
def test_fold(seed, a, b):
    base = rng.key(seed, "fold")
    assert torch.equal(rng.fold(base, a), rng.fold(base, torch.tensor(a)))       # a number on the host or on the device
    assert torch.equal(rng.fold(base, a), rng.fold(base, b)) is (a == b)
    assert rng.fold(base, a).dtype == torch.int64
    assert rng.fold(base, a).dim() == 0


def test_many_keys_do_not_collide():
    keys = {int(rng.key(0, "step", client, round_)) for client in range(60) for round_ in range(60)}
    assert len(keys) == 3600
    base = rng.key(0)
    assert len({int(rng.fold(base, i)) for i in range(5000)}) == 5000


def test_draws_are_a_function_of_the_key():
    assert torch.equal(rng.normal(rng.key(3, "x"), (4, 5)), rng.normal(rng.key(3, "x"), (4, 5)))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    rng.uniform(rng.key(1), (10,))
    rng.host(rng.key(1)).beta(0.5, 0.5, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_longer_draw_begins_like_a_shorter_one():
    assert torch.equal(rng.uniform(rng.key(4), (100,))[:10], rng.uniform(rng.key(4), (10,)))


def test_written_down():
    """Numbers of this release; a change here changes every run ever recorded."""
    assert [int(v) for v in rng.permutation(rng.key(0, "a"), 6)] == [4, 5, 2, 3, 0, 1]
    assert rng.uniform(rng.key(0, "a"), (3,)).tolist() == pytest.approx([0.3263264, 0.3769973, 0.0857219], abs=1e-7)
    assert int(rng.key(0, "step", 3, 1)) == 399878533988253017


# ---- quality: bounds of five standard errors for fixed keys ------------------------------------------------------------

N = 200_000


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_moments_of_uniform(seed):
    u = rng.uniform(rng.key(seed, "quality"), (N,)).double()
    # mean ½ ± 5·√(1/12/N); variance 1/12, whose standard error is √((1/80 − 1/144)/N)
    assert abs(u.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / N)
    assert abs(u.var().item() - 1 / 12) < 5 * math.sqrt((1 / 80 - 1 / 144) / N)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_moments_of_normal(seed):
    z = rng.normal(rng.key(seed, "quality"), (N,)).double()
    # standard errors: mean 1/√N, variance √(2/N), skewness √(6/N), kurtosis √(24/N)
    assert abs(z.mean().item()) < 5 / math.sqrt(N)
    assert abs(z.var().item() - 1) < 5 * math.sqrt(2 / N)
    assert abs((z**3).mean().item()) < 5 * math.sqrt(15 / N)
    assert abs((z**4).mean().item() - 3) < 5 * math.sqrt(96 / N)
    assert z.isfinite().all()


def test_uniform_fills_its_bins():
    # χ² with 99 degrees of freedom: mean 99, standard deviation √198 ≈ 14.1
    u = rng.uniform(rng.key(8, "bins"), (N,))
    counts = torch.histc(u, 100, 0, 1).double()
    chi = ((counts - N / 100) ** 2 / (N / 100)).sum().item()
    assert 99 - 5 * 14.1 < chi < 99 + 5 * 14.1


def test_neighbours_are_independent():
    u = rng.uniform(rng.key(9, "lag"), (N,)).double() - 0.5
    for lag in (1, 2, 3, 64):                                      # correlation ± 5/√N
        assert abs((u[:-lag] * u[lag:]).mean().item() * 12) < 5 / math.sqrt(N)


def test_streams_of_neighbouring_keys_are_independent():
    base = rng.key(0, "streams")
    u = torch.stack([rng.uniform(rng.fold(base, i), (4000,)) for i in range(50)]).double() - 0.5
    # 1225 correlations of 4000 pairs: the largest of so many stays below 5/√4000
    correlation = (u @ u.T) * 12 / 4000
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(4000)


def test_every_place_is_equally_likely_in_a_permutation():
    places = torch.zeros(5, 5)
    for i in range(2000):
        places[torch.arange(5), rng.permutation(rng.fold(rng.key(2), i), 5)] += 1
    assert (places - 400).abs().max() < 5 * math.sqrt(2000 * 0.2 * 0.8)


def test_every_bit_is_a_fair_coin():
    bits = rng.bits(rng.key(6), 20_000).numpy().view(np.uint64)
    ones = [int(((bits >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(64)]
    assert max(abs(n - 10_000) for n in ones) < 5 * math.sqrt(5000)


def test_host_generators_are_keyed():
    a, b = rng.host(rng.key(1, "a")), rng.host(rng.key(1, "b"))
    assert a.random() == rng.host(rng.key(1, "a")).random()
    assert a.random() != b.random()
    assert 0 <= rng.seed_torch(rng.key(5, "x")) < 2**63


# ---- several draws at once -------------------------------------------------------------------------------------------

@given(seeds, st.integers(0, 40), st.integers(1, 4))
def test_shuffles_are_the_permutations_of_their_keys(seed, n, count):
    keys = rng.keys(seed, "s", each=range(count))
    assert torch.equal(rng.shuffles(keys, n), torch.stack([rng.bits(k, n).argsort() for k in keys]))
    assert rng.shuffles(keys, n).dtype == torch.int64


def test_long_permutations_sort_their_draws():
    key = rng.key(3, "long")
    assert torch.equal(rng.permutation(key, 5000), rng.bits(key, 5000).argsort())


def test_draws_that_differ_in_low_bits_alone_are_still_in_order(monkeypatch):
    # four draws that agree in all but the two bits their places would ride in: 3, 1, 2, 0 sort to places 3, 1, 2, 0
    monkeypatch.setattr(rng, "_draw_array", lambda keys, n: np.array([[64 + 3, 64 + 1, 64 + 2, 64]]))
    assert rng.shuffles(rng.key(0)[None], 4).tolist() == [[3, 1, 2, 0]]


@given(seeds, st.integers(-(2**63), 2**63 - 1))
def test_keys_from_the_host_are_those_of_tensors(seed, number):
    key = rng.key(seed, "w")
    assert torch.equal(rng.fold(key, number), rng._mix(key * rng._GOLDEN + number))


@pytest.mark.parametrize("n", [1, 7, 1 << 15, (1 << 15) + 1])
def test_bits_from_numpy_are_those_of_torch(n):
    key = rng.key(1, "bits")
    assert torch.equal(rng.bits(key, n), rng._mix(key + (torch.arange(n) + 1) * rng._GOLDEN))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 50, 5000, 70000])
def test_shuffles_on_a_gpu_are_those_of_the_host(n):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys = rng.keys(9, "gpu", each=range(3))
    assert torch.equal(rng.shuffles(keys.cuda(), n).cpu(), rng.shuffles(keys, n))


def test_the_kernel_folds_one_key_and_one_number_alone(monkeypatch):
    """Whatever has several of either, or lies behind a vmap, goes the way of tensors, on every device with the same result."""
    keys = rng.keys(7, "a", each=range(4))
    cases = [(keys, 3), (keys[0], torch.arange(4)), (keys[:1], 3), (keys[0], torch.arange(1))]
    wanted = [rng.fold(*case) for case in cases]
    each = torch.vmap(lambda k: rng.fold(k, 3))
    wanted_each, wanted_rows = each(keys), rng.uniform(keys[:1], (1,))
    asked = []
    monkeypatch.setattr(hashing, "usable", lambda keys: not torch._C._functorch.is_batchedtensor(keys))
    monkeypatch.setattr(hashing, "fold", lambda key, number: asked.append(number) or key)
    for case, want in zip(cases, wanted):
        assert torch.equal(rng.fold(*case), want)
    assert torch.equal(each(keys), wanted_each)
    assert torch.equal(torch.vmap(lambda n: rng.fold(keys[0], n))(torch.arange(4)), wanted[1])
    assert torch.equal(rng.uniform(keys[:1], (1,)), wanted_rows)
    assert not asked
    rng.fold(keys[0], 3)
    rng.fold(keys[0], torch.tensor(4))
    assert asked == [3, 4]


def test_which_keys_the_kernels_read(monkeypatch):
    assert not hashing.usable(rng.key(0))
    monkeypatch.setattr(hashing, "triton", object())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    keys = rng.keys(7, each=range(4))
    assert hashing.usable(keys)
    assert hashing.usable(keys[2])
    assert not hashing.usable(keys[::2])
    assert not hashing.usable(keys[:1].expand(1 << 16))
    behind = []
    torch.vmap(lambda k: behind.append(hashing.usable(k)) or k)(keys)
    assert behind == [False]


@pytest.mark.gpu
def test_folds_on_a_gpu_are_those_of_the_host():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys, numbers = rng.keys(7, each=range(4)), torch.arange(5)
    assert torch.equal(rng.fold(keys.cuda(), 3).cpu(), rng.fold(keys, 3))
    assert torch.equal(rng.fold(keys[0].cuda(), numbers.cuda()).cpu(), rng.fold(keys[0], numbers))
    assert torch.equal(rng.keys(keys[0].cuda(), "x", each=range(3)).cpu(), rng.keys(keys[0], "x", each=range(3)))
    assert torch.equal(torch.vmap(lambda k: rng.uniform(k, (2,)))(keys.cuda()).cpu(), torch.vmap(lambda k: rng.uniform(k, (2,)))(keys))
