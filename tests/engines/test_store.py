"""Clients' states on disk: the same numbers as in memory, whole rounds or nothing, and checkpoints that write what changed."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import tree
from consilience.core.client import ClientState
from consilience.core.federation import Federation
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.snapshot import restore, snapshot
from consilience.core.store import MemoryStore
from consilience.engines import Sequential
from consilience.engines.store import FILE, INDEX, DiskStore
from consilience.errors import ConsilienceError, DataError
from consilience.parts import PARTS
from consilience.parts.scaffold import Scaffold
from consilience.testing import LAYOUT, differences, run_tiny, tiny_net, tiny_population, trial

FRESH = ClientState({"kept": {"a": {"w": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}}, "local": {}, "own": {}})


def state(value: int, seen: int = 0) -> ClientState:
    tensors = {"kept": {"a": {"w": torch.full((3,), float(value)), "n": torch.tensor(value)}}, "local": {}, "own": {}}
    return ClientState(tensors, False, seen, value)


def same(a: ClientState, b: ClientState) -> bool:
    return (a.first, a.seen, a.own_round) == (b.first, b.seen, b.own_round) and a.tensors.keys() == b.tensors.keys() and \
        all(torch.equal(x, y) for (_, x), (_, y) in zip(tree.paths(a.tensors), tree.paths(b.tensors)))


def federation(parts, store, **policy) -> Federation:
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "batch": 8, "epochs": 2, "weights": "uniform"} | policy
    return Federation(tiny_net(), LAYOUT, Method(parts), tiny_population(), Policy(**settings), Sequential, store=store)


@pytest.mark.parametrize("name", ["scaffold", "ditto", "moon", "bn", "mr", "anchors", "fomo", "proto", "moreau", "apple"])
def test_rounds_are_those_of_a_store_in_memory(name, tmp_path):
    part = trial(PARTS[name])
    fed = federation([part], DiskStore.inside(tmp_path))
    for cohort in (None, [0, 3], None):
        fed.round(cohort)
    other = federation([part], MemoryStore)
    for cohort in (None, [0, 3], None):
        other.round(cohort)
    assert not differences(fed, other)
    assert snapshot(fed)[1] == snapshot(other)[1]


@given(st.lists(st.one_of(st.tuples(st.integers(0, 6), st.integers(1, 99)), st.sampled_from(["commit", "rollback", "save", "load"])),
                max_size=40))
def test_behaves_like_a_dictionary(steps):
    """Against a model: puts count at once, commits stay, rollbacks go, and a load brings back what was saved."""
    import tempfile
    from pathlib import Path
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(FRESH, Path(folder))
        committed: dict[int, int] = {}
        pending: dict[int, int] = {}
        saved: list[tuple[dict, dict, str]] = []
        for count, step in enumerate(steps):
            if isinstance(step, tuple):
                store.put(step[0], state(step[1]))
                pending[step[0]] = step[1]
            elif step == "commit":
                store.commit()
                committed, pending = {**committed, **pending}, {}
            elif step == "rollback":
                store.rollback()
                pending = {}
            elif step == "save":
                place = Path(folder) / f"c{count}"
                place.mkdir()
                saved.append((dict(committed), store.save(place, place.name), place.name))
                if len(saved) > 2:                                  # as a run keeps its two newest checkpoints
                    store.forget(saved.pop(0)[2])
            elif saved:
                then, about, name = saved[-1]
                store.load(Path(folder) / name, about, name, [(n, Path(folder) / n) for _, _, n in saved[:-1]])
                committed, pending = dict(then), {}
            now = {**committed, **pending}
            assert [i for i, _ in store.visited()] == sorted(now)
            for i in range(7):
                assert same(store.get(i), state(now[i]) if i in now else FRESH)
        store.close()


def test_records_are_reused(tmp_path):
    store = DiskStore(FRESH, tmp_path)
    for turn in range(50):
        for i in range(4):
            store.put(i, state(turn))
        store.commit()
    # four states in use and four more while a round is written
    assert (tmp_path / FILE).stat().st_size == 8 * store.record_bytes


def test_a_checkpoint_survives_what_comes_after(tmp_path):
    store = DiskStore(FRESH, tmp_path)
    for i in range(3):
        store.put(i, state(i + 1))
    store.commit()
    about = store.save(tmp_path, "first")
    for turn in range(5):
        store.put(0, state(100 + turn))
        store.commit()
    later = DiskStore(FRESH, tmp_path)                              # the process died; another goes on
    later.load(tmp_path, about, "first")
    assert same(later.get(0), state(1))
    later.put(0, state(7))
    later.commit()
    again = DiskStore(FRESH, tmp_path)                              # and died as well
    again.load(tmp_path, about, "first")
    assert [same(again.get(i), state(i + 1)) for i in range(3)] == [True] * 3


def test_a_client_never_visited_occupies_nothing(tmp_path):
    store = DiskStore(FRESH, tmp_path)
    store.put(90_000, state(1))
    store.put(50_000, replace(FRESH, seen=4))                       # it has listened, but holds what everybody holds
    store.commit()
    assert (tmp_path / FILE).stat().st_size == store.record_bytes
    assert [i for i, _ in store.visited()] == [50_000, 90_000]
    assert store.get(50_000).seen == 4
    assert store.get(50_000).tensors is FRESH.tensors
    about = store.save(tmp_path, "one")
    with np.load(tmp_path / INDEX) as stored:
        assert len(stored["numbers"]) == 2
    assert about["file"] == INDEX


def test_a_full_disk_undoes_the_round(tmp_path, monkeypatch):
    fed = federation([Scaffold()], DiskStore.inside(tmp_path))
    fed.round()
    then = {k: v.clone() for k, v in snapshot(fed)[0].items()}
    real, calls = fed.clients._records.write, []

    def full(record, tensors):
        calls.append(record)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(record, tensors)
    monkeypatch.setattr(fed.clients._records, "write", full)
    with pytest.raises(ConsilienceError, match="The disk is full"):
        fed.round()
    assert fed.round_number == 1
    now = snapshot(fed)[0]
    assert all(torch.equal(now[k], then[k]) for k in then)
    fed.round()                                                     # there is room again
    assert not differences(fed, run_tiny([Scaffold()]))


def test_damage_is_noticed(tmp_path):
    store = DiskStore(FRESH, tmp_path)
    store.put(0, state(5))
    store.commit()
    about = store.save(tmp_path, "one")
    with open(tmp_path / FILE, "r+b") as file:
        file.seek(3)
        file.write(b"\xff")
    other = DiskStore(FRESH, tmp_path)
    other.load(tmp_path, about, "one")
    with pytest.raises(DataError, match="does not match its checksum"):
        other.get(0)
    os.truncate(tmp_path / FILE, 10)
    with pytest.raises(DataError, match="does not match its checksum"):
        other.get(0)
    (tmp_path / INDEX).write_bytes((tmp_path / INDEX).read_bytes()[:-4] + b"abcd")
    with pytest.raises(DataError, match="recorded hash"):
        DiskStore(FRESH, tmp_path).load(tmp_path, about, "one")
    with pytest.raises(DataError, match="There is no file"):
        DiskStore(FRESH, tmp_path).load(tmp_path / "nowhere", about, "one")


def test_a_state_of_another_shape_is_refused(tmp_path):
    store = DiskStore(FRESH, tmp_path)
    wrong = state(1)
    wrong.tensors["kept"]["a"]["w"] = torch.zeros(4)
    store.put(0, wrong)
    with pytest.raises(DataError, match="kept/a/w"):
        store.commit()


def test_a_run_goes_on_from_a_checkpoint_of_the_store(tmp_path):
    whole = run_tiny([Scaffold()], rounds=3)
    first = federation([Scaffold()], DiskStore.inside(tmp_path))
    first.round()
    tensors, meta = snapshot(first, clients=False)
    about = first.clients.save(tmp_path, "one")
    assert not [k for k in tensors if k.startswith("clients/")]
    first.round()                                                   # lost with the process
    second = federation([Scaffold()], DiskStore.inside(tmp_path))
    restore(second, tensors, meta)
    second.clients.load(tmp_path, about, "one")
    for _ in range(2):
        second.round()
    assert not differences(whole, second)


def test_channels_last_states_keep_their_layout(tmp_path):
    fed = federation([trial(PARTS["ditto"])], DiskStore.inside(tmp_path), layout="channels_last")
    fed.round()
    again = fed.client(0).tensors["personal"]["ditto"]["model"]["params"]
    for k, t in fed.clients.fresh.tensors["personal"]["ditto"]["model"]["params"].items():
        assert again[k].stride() == t.stride()
