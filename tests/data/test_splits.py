"""What holds for every split: disjoint, complete but for a documented remainder, reproducible from the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience import rng
from consilience.data import splits
from consilience.data.dataset import Dataset
from consilience.data.shifts import SHIFTS
from consilience.data.splits import SPLITS
from consilience.data.splits.dirichlet import Dirichlet
from consilience.data.transforms import NAMED, STEPS

quick = settings(max_examples=25, deadline=None)


def dataset(labels: torch.Tensor, classes: int, **more) -> Dataset:
    return Dataset("made", torch.zeros(len(labels), 1), labels, classes, **more)


@st.composite
def labelled(draw, least=24, most=60, classes=(2, 7)):
    """Labels of several classes with `least` to `most` samples each, in mixed order."""
    sizes = draw(st.lists(st.integers(least, most), min_size=classes[0], max_size=classes[1]))
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return labels[rng.permutation(rng.key(draw(st.integers(0, 99))), len(labels))], len(sizes)


def assign(text, data, clients, seed=0, rows=None):
    rows = torch.arange(len(data.y)) if rows is None else rows
    return splits.make(text).assign(data, rows, clients, rng.key(seed))


def check(text, data, clients, seed, rows=None):
    """The assignment, after everything that must hold for any split."""
    rows = torch.arange(len(data.y)) if rows is None else rows
    a = assign(text, data, clients, seed, rows)
    assert len(a.rows) == len(a.names) == len(set(a.names))
    for mine in a.rows:
        assert mine.dtype == torch.int64
        assert len(mine) > 0
        assert (mine.diff() > 0).all()                                        # sorted, no row twice
    together = torch.cat([*a.rows, a.unused])
    assert torch.equal(together.sort().values, rows.sort().values)            # disjoint, and nothing lost or invented
    again = assign(text, data, clients, seed, rows.flip(0))                   # the order of the rows has no part in it
    assert a.names == again.names
    assert all(torch.equal(p, q) for p, q in zip(a.rows, again.rows))
    return a


@quick
@given(labelled(), st.integers(2, 6), st.floats(0.2, 5.0), st.booleans(), st.integers(0, 999))
def test_dirichlet(made, clients, alpha, cap, seed):
    labels, classes = made
    a = check(f"dirichlet(alpha={alpha}, min_size=2, cap={cap}, tries=1000)", dataset(labels, classes), clients, seed)
    assert len(a.rows) == clients
    assert not len(a.unused)
    assert min(map(len, a.rows)) >= 2


@quick
@given(labelled(), st.integers(1, 9), st.sampled_from(["prior", "flat"]), st.floats(0.01, 5.0), st.integers(0, 999))
def test_client_dirichlet_gives_equal_shards(made, clients, kind, alpha, seed):
    labels, classes = made
    a = check(f"client_dirichlet_{kind}(alpha={alpha})", dataset(labels, classes), clients, seed)
    assert {len(r) for r in a.rows} == {len(labels) // clients}
    assert len(a.unused) == len(labels) % clients                             # the documented remainder


@quick
@given(labelled(), st.integers(1, 30), st.integers(0, 999))
def test_iid_sizes_differ_by_at_most_one(made, clients, seed):
    labels, classes = made
    a = check("iid", dataset(labels, classes), clients, seed)
    sizes = [len(r) for r in a.rows]
    assert max(sizes) - min(sizes) <= 1
    assert not len(a.unused)


@quick
@given(labelled(), st.integers(1, 6), st.floats(0.3, 5.0), st.integers(0, 999))
def test_quantity(made, clients, alpha, seed):
    labels, classes = made
    a = check(f"quantity(alpha={alpha}, min_size=2, tries=1000)", dataset(labels, classes), clients, seed)
    assert min(map(len, a.rows)) >= 2
    assert not len(a.unused)


@quick
@given(labelled(), st.integers(1, 10), st.integers(1, 4), st.booleans(), st.integers(0, 999))
def test_pathological(made, clients, per_client, balanced, seed):
    labels, classes = made
    per_client = min(per_client, classes)
    text = f"pathological(classes_per_client={per_client}, balanced={balanced}, least=1)"
    a = check(text, dataset(labels, classes), clients, seed)
    held = [int(labels[r].unique().numel()) for r in a.rows]
    assert max(held) <= per_client
    if classes % per_client == 0 and clients * per_client % classes == 0:     # then every need and every class is met
        assert held == [per_client] * clients
        assert not len(a.unused)
    whole = torch.bincount(labels[a.unused], minlength=classes)               # a class is given whole or not at all
    assert all(int(n) in (0, int((labels == c).sum())) for c, n in enumerate(whole))


@quick
@given(labelled(), st.integers(0, 3), st.integers(1, 2), st.booleans(), st.integers(0, 999))
def test_dominant_class(made, own, common, shuffle, seed):
    labels, classes = made
    a = check(f"dominant_class(own={own}, common={common}, shuffle={shuffle})", dataset(labels, classes), classes, seed)
    shard = int(torch.bincount(labels).min()) // (own + classes * common)
    expected = torch.full((classes, classes), common * shard) + torch.eye(classes, dtype=torch.int64) * own * shard
    assert torch.equal(torch.stack([torch.bincount(labels[r], minlength=classes) for r in a.rows]), expected)


@quick
@given(labelled(), st.integers(1, 12), st.integers(0, 5), st.integers(0, 999))
def test_missing_classes(made, clients, missing, seed):
    labels, classes = made
    missing = min(missing, classes - 1)
    a = check(f"missing_classes(missing={missing})", dataset(labels, classes), clients, seed)
    for i, mine in enumerate(a.rows):
        assert set(labels[mine].tolist()) == {(i + j) % classes for j in range(classes - missing)}
    assert len({len(r) for r in a.rows}) == 1
    assert len({int(n) for r in a.rows for n in labels[r].unique(return_counts=True)[1]}) == 1


@quick
@given(labelled(), st.integers(1, 9), st.integers(0, 999))
def test_by_group(made, groups, seed):
    labels, classes = made
    where = rng.integers(rng.key(seed, "where"), groups, labels.shape)
    data = dataset(labels, classes, groups={"writer": where})
    a = check("by_group", data, None, seed)
    assert not len(a.unused)
    assert [set(where[r].tolist()) for r in a.rows] == [{v} for v in where.unique().tolist()]
    most = max(len(a.rows) - 1, 1)
    for choose in ("drawn", "largest", "first"):
        few = check(f"by_group(most={most}, choose={choose})", data, most, seed)
        assert len(few.rows) == most
        assert set(few.names) <= set(a.names)


@quick
@given(labelled(least=40), st.integers(1, 3), st.integers(0, 999))
def test_domain_halves(made, domains, seed):
    labels, classes = made
    where = torch.arange(len(labels)) % domains
    cut = (classes - 2) // 2
    a = check(f"domain_halves(cut={cut})", dataset(labels, classes, groups={"domain": where}), 2 * domains, seed)
    assert not len(a.unused)
    for i, mine in enumerate(a.rows):
        assert set(where[mine].tolist()) == {i // 2}
        assert (labels[mine] > cut).all() if i % 2 else (labels[mine] <= cut).all()


@quick
@given(labelled(), st.floats(0, 0.5), st.integers(0, 999))
def test_two_halves(made, alpha, seed):
    labels, classes = made
    a = check(f"two_halves(alpha={alpha})", dataset(labels, classes), None, seed)
    assert not len(a.unused)
    for c in range(classes):
        owner = int(c >= (classes + 1) // 2)
        here = (labels[a.rows[owner]] == c).sum()
        total = (labels == c).sum()
        assert int(total - here) == round(alpha * int(total))


@quick
@given(labelled(least=40), st.floats(0.1, 0.6), st.integers(10, 30), st.integers(0, 999))
def test_two_dominant(made, share, size, seed):
    labels, classes = made
    a = check(f"two_dominant(share={share}, size={size})", dataset(labels, classes), 2, seed)
    for client, dominant in enumerate((0, 1)):
        counts = torch.bincount(labels[a.rows[client]], minlength=classes)
        assert int(counts.sum()) == size
        assert int(counts[dominant]) == round(share * size)
        others = torch.cat([counts[:dominant], counts[dominant + 1:]])
        assert int(others.max() - others.min()) <= 1


DRAWN = ["dirichlet(alpha=0.5)", "dirichlet(alpha=0.5, cap=False)", "client_dirichlet_prior(alpha=0.5)",
         "client_dirichlet_flat(alpha=0.5)", "iid", "quantity(alpha=1)", "pathological(classes_per_client=2)",
         "missing_classes(missing=3)", "dominant_class(shuffle=True)"]


@pytest.mark.parametrize("text", DRAWN)
def test_another_key_gives_another_split(text):
    data = dataset(torch.arange(2000) % 10, 10)
    one, two = (assign(text, data, 10, seed) for seed in (0, 1))
    assert any(not torch.equal(p, q) for p, q in zip(one.rows, two.rows))


@pytest.mark.parametrize("text", DRAWN[1:6])
def test_renaming_the_classes_leaves_the_split_unchanged(text):
    labels = torch.arange(2000) % 10
    renamed = rng.permutation(rng.key(5), 10)[labels]
    assert not torch.equal(labels, renamed)
    one, two = (assign(text, dataset(y, 10), 10) for y in (labels, renamed))
    assert all(torch.equal(p, q) for p, q in zip(one.rows, two.rows))


def test_only_the_cap_makes_dirichlet_depend_on_the_order_of_classes():
    """The draw of a class is the same under any label; the cap visits classes in label order, so it may act elsewhere."""
    labels = torch.arange(2000) % 10
    split = Dirichlet(alpha=0.3)
    members = (labels == 3).nonzero().flatten()
    draws = split.log_shares(members, 10, 0, rng.key(0))
    assert (draws == split.log_shares(members, 10, 0, rng.key(0))).all()
    assert (draws != split.log_shares(members, 10, 1, rng.key(0))).any()       # another try is another draw
    assert (draws != split.log_shares(members + 1, 10, 0, rng.key(0))).any()   # so is another class of the same size

    def owners(y, cap):
        a = assign(f"dirichlet(alpha=0.3, cap={cap}, min_size=1)", dataset(y, 20), 10)
        out = torch.empty(2000, dtype=torch.int64)
        for i, mine in enumerate(a.rows):
            out[mine] = i
        return out

    assert torch.equal(owners(labels, True), owners(2 * labels + 1, True))     # labels moved apart, order kept
    assert not torch.equal(owners(labels, True), owners(9 - labels, True))     # order reversed
    assert torch.equal(owners(labels, False), owners(9 - labels, False))


def test_one_class_does_not_depend_on_the_others():
    """Without cap and retry, class 0 falls to the same clients whether the other classes are there or not."""
    labels = torch.arange(3000) % 3
    data = dataset(labels, 3)
    text = "dirichlet(alpha=1.0, cap=False, min_size=1)"
    whole = assign(text, data, 4)
    alone = assign(text, data, 4, rows=(labels == 0).nonzero().flatten())
    for mine, only in zip(whole.rows, alone.rows):
        assert torch.equal(mine[labels[mine] == 0], only)


def test_every_split_of_the_registry_is_tested_here():
    tested = {"dirichlet", "client_dirichlet_prior", "client_dirichlet_flat", "iid", "quantity", "pathological", "dominant_class",
              "missing_classes", "by_group", "domain_halves", "two_halves", "two_dominant"}
    assert set(SPLITS) == tested
    for name, cls in SPLITS.items():
        split = cls()
        assert splits.make(split.text) == split                                # the text of a split makes the same split
        assert splits.make(name) == split
        assert splits.make(split) is split
        assert cls.summary


def test_the_page_on_splits_names_all_of_them_and_its_pictures_are_there():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "splits.md").read_text(encoding="utf-8")
    assert [n for n in [*SPLITS, *SHIFTS, *STEPS, *NAMED] if f"`{n}" not in page] == []
    pictures = re.findall(r"\((images/[^)]+)\)", page)
    assert len(pictures) == len(SPLITS)
    assert all((docs / p).stat().st_size < 60_000 for p in pictures)
