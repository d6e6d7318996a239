"""Snapshots: complete, apart from the federation they came from, and refused where they do not fit."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from consilience.core.snapshot import restore, snapshot
from consilience.errors import DataError
from consilience.parts.anchors import Anchors
from consilience.parts.babu import Babu
from consilience.parts.ditto import Ditto
from consilience.parts.moon import Moon
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny, tiny_federation

PARTS = [Scaffold(), Ditto(), Moon()]


def test_a_run_cut_in_two_goes_on_bit_for_bit():
    settings = {"participation": 0.5, "dropout": 0.2, "sizes": (16,) * 6}
    whole = run_tiny(PARTS, rounds=4, **settings)
    half = run_tiny(PARTS, rounds=2, **settings)
    tensors, meta = snapshot(half)
    meta = json.loads(json.dumps(meta))                           # what a file would hold
    fresh = tiny_federation(PARTS, **settings)
    restore(fresh, {k: t.clone() for k, t in tensors.items()}, meta)
    for _ in range(2):
        fresh.round()
    assert not differences(whole, fresh)
    assert snapshot(whole)[1] == snapshot(fresh)[1]


def test_kept_optimiser_states_are_in_it():
    whole = run_tiny(rounds=3, optimiser_state="kept")
    fresh = tiny_federation(optimiser_state="kept")
    restore(fresh, *snapshot(run_tiny(rounds=1, optimiser_state="kept")))
    fresh.round()
    fresh.round()
    assert not differences(whole, fresh)


def test_a_client_never_visited_takes_no_room():
    fed = tiny_federation(PARTS)
    fed.round([0])
    assert {k.split("/")[1] for k in snapshot(fed)[0] if k.startswith("clients/")} == {"0"}


def test_a_snapshot_stays_what_it_was():
    fed = run_tiny([Scaffold()], rounds=1)
    tensors, meta = snapshot(fed)
    then = {k: t.clone() for k, t in tensors.items()}, copy.deepcopy(meta)
    fed.round()
    assert all(torch.equal(tensors[k], then[0][k]) for k in tensors)
    assert meta == then[1]


def test_restoring_forgets_what_came_after():
    fed = tiny_federation([Scaffold()])
    fed.round([0])
    tensors, meta = copy.deepcopy(snapshot(fed))
    fed.round([1])
    restore(fed, tensors, meta)
    assert [i for i, _ in fed.clients.visited()] == [0]
    other = tiny_federation([Scaffold()])
    other.round([0])
    fed.round()
    other.round()
    assert not differences(fed, other)


def broken(change):
    tensors, meta = snapshot(run_tiny([Scaffold()], rounds=1))
    tensors = dict(tensors)
    change(tensors)
    return tensors, meta


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model/params/head.weight"), r"'model/params/head.weight' is missing"),
    (lambda t: t.pop("clients/0/kept/scaffold/c/head.bias"), r"'clients/0/kept/scaffold/c/head.bias' is missing"),
    (lambda t: t.update({"shared/prox/x": torch.zeros(1)}), r"'shared/prox/x' is not expected"),
    (lambda t: t.update({"clients/7/kept/x": torch.zeros(1)}), r"'clients/7/kept/x' is not expected"),
    (lambda t: t.update({"model/params/head.bias": torch.zeros(4)}), r"'model/params/head.bias' is \(4,\) torch.float32, expected \(3,\)"),
    (lambda t: t.update({"model/params/head.bias": torch.zeros(3).double()}), r"float64, expected \(3,\) torch.float32"),
])
def test_what_does_not_fit_is_refused_and_nothing_is_changed(change, message):
    fed = tiny_federation([Scaffold()])
    before = snapshot(fed)[0]
    with pytest.raises(DataError, match=message):
        restore(fed, *broken(change))
    after = snapshot(fed)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert fed.round_number == 0


def test_another_method_is_refused():
    with pytest.raises(DataError, match="does not fit this run"):
        restore(tiny_federation([Babu()]), *snapshot(run_tiny([Scaffold()], rounds=1)))
    with pytest.raises(DataError, match="does not fit this run"):
        restore(tiny_federation([Scaffold(), Anchors()]), *snapshot(run_tiny([Scaffold()], rounds=1)))


def test_restored_tensors_are_the_federations_own():
    fed = tiny_federation()
    tensors, meta = snapshot(run_tiny(rounds=1))
    restore(fed, tensors, meta)
    tensors["model/params/head.weight"].zero_()
    assert fed.model["params"]["head.weight"].abs().sum() > 0
