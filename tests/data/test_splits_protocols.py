"""Splits against numbers that can be derived: the rule by hand, moments of the draws, counts of the papers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from consilience import rng
from consilience.data import splits
from consilience.data.dataset import Dataset
from consilience.data.splits import fractions
from consilience.data.splits.base import cut_points, log_dirichlet
from consilience.data.splits.client_dirichlet import ClientDirichletFlat, ClientDirichletPrior
from consilience.data.splits.dirichlet import Dirichlet
from consilience.data.statistics import count_labels, effective_classes


def balanced(per_class: int, classes: int, **more) -> Dataset:
    return Dataset("made", torch.zeros(per_class * classes, 1), torch.arange(per_class * classes) % classes, classes, **more)


def counts_of(text, data, clients, seed=0):
    a = splits.make(text).assign(data, torch.arange(len(data.y)), clients, rng.key(seed))
    return count_labels(data.y, a.rows, data.classes), a


class FixedShares(Dirichlet):
    """Dirichlet with the draws replaced by known shares, one row per class (told by its first row's label)."""

    def log_shares(self, members, n, attempt, key):
        return np.log(np.array([[0.75, 0.25], [0.5, 0.5]][0 if int(members[0]) == 0 else 1]))


def test_the_cap_and_the_cut_by_hand():
    # 12 samples of class 0, 4 of class 1, two clients: n / N = 8.
    # Class 0: int(0.75 · 12) = 9 to client 0, 3 to client 1. Client 0 holds 9 ≥ 8, so its share of class 1 is 0: client 1 takes 4.
    data = Dataset("made", torch.zeros(16, 1), torch.tensor([0] * 12 + [1] * 4), 2)
    a = FixedShares(min_size=1).assign(data, torch.arange(16), 2, rng.key(0))
    assert count_labels(data.y, a.rows, 2).tolist() == [[9, 0], [3, 4]]
    # Without the cap class 1 is halved: 2 and 2.
    a = FixedShares(min_size=1, cap=False).assign(data, torch.arange(16), 2, rng.key(0))
    assert count_labels(data.y, a.rows, 2).tolist() == [[9, 2], [3, 2]]


def test_cut_points_by_hand():
    # Cumulated shares .28, .65, 1 of 10: int(2.8) = 2, int(6.5) = 6, the last takes the rest: 2, 4, 4.
    assert cut_points(np.array([0.28, 0.37, 0.35]), 10).tolist() == [2, 4, 4]
    assert cut_points(np.array([0.0, 1.0]), 5).tolist() == [0, 5]


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_moments_of_the_dirichlet_draw(alpha):
    # Dir(α, …, α) over N: mean 1/N, variance (1/N)(1 − 1/N) / (αN + 1).
    generator, n, draws = np.random.default_rng(0), 5, 20000
    shares = np.exp([log_dirichlet(np.full(n, alpha), generator) for _ in range(draws)])
    variance = 0.2 * 0.8 / (alpha * n + 1)
    assert np.allclose(shares.sum(1), 1)
    assert np.allclose(shares.mean(0), 0.2, atol=4 * math.sqrt(variance / draws))
    assert np.allclose(shares.var(0), variance, rtol=0.05)


def test_tiny_concentrations_stay_finite():
    # At 1e-4 a Gamma number is about exp(−10000): it is 0 as a float, but its logarithm is not.
    draw = log_dirichlet(np.full(50, 1e-4), np.random.default_rng(0))
    assert np.isfinite(draw).all()
    assert draw.min() < -1000
    assert math.isclose(np.exp(draw).sum(), 1)


@pytest.mark.parametrize(("cls", "expected", "largest"), [(ClientDirichletPrior, 1.19, 0.94), (ClientDirichletFlat, 2.5, None)])
def test_effective_classes_of_the_two_concentrations(cls, expected, largest):
    """METHODS §8.1-B, ten balanced classes, alpha 0.1: 1.19 classes (94 % in one) for alpha · p, 2.5 for alpha."""
    split, full = cls(alpha=0.1), np.full(10, 5000)
    counts = torch.from_numpy(np.stack([split._counts(full, 5000, rng.key(0, "test", i)) for i in range(4000)]))
    # One draw has a standard deviation of about 0.35 (prior) and 1.0 (flat); 4000 draws: 0.006 and 0.016. Five of them: 0.08.
    assert float(effective_classes(counts).mean()) == pytest.approx(expected, abs=0.08)
    if largest:
        assert float((counts.max(1).values / 5000).mean()) == pytest.approx(largest, abs=0.01)


def test_client_dirichlet_passes_over_classes_that_ran_out():
    # q = (1, 0, 0) wants class 0 only, which has 3. After these, q's whole mass is gone: a new q over classes 1 and 2.
    class Fixed(ClientDirichletFlat):
        def _distribution(self, remaining, generator):
            return np.where(remaining > 0, [1.0, 0.0, 0.0] if remaining[0] else [0.0, 1.0, 0.0], 0.0)

    assert Fixed()._counts(np.array([3, 10, 10]), 8, rng.key(0)).tolist() == [3, 5, 0]


def test_niid_2_of_cifar10():
    counts, a = counts_of("dominant_class", balanced(5000, 10), 10)
    assert torch.equal(counts, torch.full((10, 10), 300) + 2000 * torch.eye(10, dtype=torch.int64))      # 2300 / 300
    assert counts.sum(1).tolist() == [5000] * 10
    assert not len(a.unused)
    # In file order: client 3 has the first 2000 of class 3 (rows 3, 13, …, 19993).
    assert torch.isin(torch.arange(3, 20000, 10), a.rows[3]).all()


def test_niid_2_of_cinic10_and_cifar100():
    counts, _ = counts_of("dominant_class(own=40, common=5)", balanced(9000, 10), 10)
    assert torch.equal(counts, torch.full((10, 10), 500) + 4000 * torch.eye(10, dtype=torch.int64))      # 4500 / 500
    counts, a = counts_of("dominant_class", balanced(500, 100), 10)
    expected = torch.full((10, 100), 30)
    for i in range(10):
        expected[i, 10 * i:10 * i + 10] = 230
    assert torch.equal(counts, expected)
    assert counts.sum(1).tolist() == [5000] * 10
    assert not len(a.unused)


@pytest.mark.parametrize("missing", [1, 2, 3, 5, 7])
def test_niid_3(missing):
    counts, a = counts_of(f"missing_classes(missing={missing})", balanced(5000, 10), 10)
    each = 5000 // (10 - missing)
    for i in range(10):
        assert counts[i].tolist() == [each if (c - i) % 10 < 10 - missing else 0 for c in range(10)]
    assert len(a.unused) == 50000 - 10 * (10 - missing) * each                 # 20 for missing = 3


def test_pacs_halves():
    domains = ("art_painting", "cartoon", "photo", "sketch")
    data = balanced(40, 7, groups={"domain": torch.arange(280) // 70}, group_names={"domain": domains})
    counts, a = counts_of("domain_halves", data, None)
    assert a.names == [f"{d}_{half}" for d in domains for half in ("0-3", "4-6")]
    assert counts.tolist() == [[10, 10, 10, 10, 0, 0, 0], [0, 0, 0, 0, 10, 10, 10]] * 4


def test_pathological_of_fashion_mnist():
    """DBE: 20 clients, two of ten classes, 7000 per class: four clients share a class, sizes from 175 up to 1750."""
    counts, a = counts_of("pathological(classes_per_client=2)", balanced(7000, 10), 20)
    for client in range(20):
        first = 2 * (client // 4)                                              # classes 0, 1 to clients 0–3, and so on
        assert (counts[client] > 0).nonzero().flatten().tolist() == [first, first + 1]
    for label in range(10):
        mine = counts[4 * (label // 2):4 * (label // 2) + 4, label].tolist()
        assert all(175 <= n < 1750 for n in mine[:3])
        assert sum(mine) == 7000
    assert not len(a.unused)


def test_toys():
    counts, _ = counts_of("two_halves", balanced(100, 10), None)
    assert counts.tolist() == [[100] * 5 + [0] * 5, [0] * 5 + [100] * 5]
    counts, _ = counts_of("two_halves(alpha=0.5)", balanced(100, 10), None)
    assert counts.tolist() == [[50] * 10] * 2
    counts, _ = counts_of("two_dominant", balanced(5000, 10), None)
    # 2500 of the dominant class; the other 2500 over nine classes: 277 each and 7 classes with one more.
    assert counts[0].tolist() == [2500] + [278] * 7 + [277] * 2
    assert counts[1].tolist() == [278, 2500] + [278] * 6 + [277] * 2


def test_fedfa_table_11_office_caltech():
    found = [fractions.office_counts(n) for n in (958, 1123, 157, 295)]        # Amazon, Caltech, DSLR, Webcam
    assert found == [(459, 307, 192), (538, 360, 225), (75, 50, 32), (141, 95, 59)]


def test_fedfa_table_12_domainnet():
    assert fractions.domainnet_counts(2103, 526) == (672, 420, 526)            # clipart: int(.8 · .4 · 2103), int(.2 · 2103)
    table = {"infograph": (840, 525), "painting": (791, 494), "quickdraw": (1280, 800), "real": (1556, 972), "sketch": (708, 442)}
    for name, row in table.items():
        fits = [n for n in range(2000, 6000) if fractions.domainnet_counts(n, 0)[:2] == row]
        assert fits, name                                                      # r = 0.4 explains both counts of every domain
        assert not [n for n in range(2000, 6000) if fractions.domainnet_counts(n, 0, r=0.6)[:2] == row]


SITES = (261, 157, 468, 384, 411, 175)                                         # BIDMC, HK, I2CVB, BMC, RUNMC, UCL


def test_fedfa_table_13_prostate():
    found = [fractions.prostate_counts(n) for n in SITES]
    assert found == [(156, 52, 52), (94, 31, 31), (280, 93, 93), (230, 76, 76), (246, 82, 82), (105, 35, 35)]
    assert [fractions.prostate_counts(n, r=0.1).train for n in SITES] == [32, 32, 46, 38, 41, 32]


def test_divide_puts_validation_after_training_and_test_last():
    rows = torch.arange(100, 200)
    train, val, test = fractions.divide(rows, fractions.Counts(30, 20, 20), None)
    assert (train.tolist(), val.tolist(), test.tolist()) == ([*range(100, 130)], [*range(130, 150)], [*range(180, 200)])
    mixed = fractions.divide(rows, fractions.Counts(60, 20, 20), rng.key(0))
    assert torch.equal(torch.cat(mixed).sort().values, rows)
    assert not torch.equal(mixed[0], rows[:60])
    with pytest.raises(Exception, match="the client has 100"):
        fractions.divide(rows, fractions.Counts(60, 30, 20), None)


def test_a_smaller_training_fraction_is_part_of_a_larger_one():
    rows = torch.arange(50, 350)
    kept = [fractions.train_fraction(rows, k / 6, rng.key(0), least=32) for k in range(1, 7)]
    assert [len(r) for r in kept] == [50, 100, 150, 200, 250, 300]
    for small, large in itertools.pairwise(kept):
        assert torch.isin(small, large).all()
    assert len(fractions.train_fraction(rows[:60], 1 / 6, rng.key(0), least=32)) == 32
    assert len(fractions.train_fraction(rows[:20], 1 / 6, rng.key(0), least=32)) == 20
    with pytest.raises(Exception, match="above 0"):
        fractions.train_fraction(rows, 0.0, rng.key(0))
