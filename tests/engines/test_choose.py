"""Which engine runs, what a run needs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilience import tree
from consilience.core.store import MemoryStore
from consilience.engines import Sequential, choose, estimate, hardware
from consilience.engines.choose import Choice
from consilience.engines.store import DiskStore
from consilience.engines.workers import Workers
from consilience.errors import ConfigError
from consilience.parts.mr import Mr
from consilience.parts.scaffold import Scaffold
from consilience.parts.union import Union
from consilience.testing import differences, run_tiny, state_of, tiny_federation

GIB = 2**30


@pytest.mark.parametrize(("asked", "cores", "seconds", "name", "why"), [
    ("auto", 1, 1e6, "sequential", "one core"),
    ("auto", 4, 3.0, "sequential", "about 3.0 s"),
    ("auto", 4, 300.0, "workers", "4 cores"),
    ("auto", 4, None, "workers", "4 cores"),
    ("auto", 64, None, "workers", "4 cores"),               # there are four clients
    ("sequential", 64, None, "sequential", "asked for"),
    ("workers", 3, 0.1, "workers", "asked for"),
])
def test_the_choice_on_a_cpu(asked, cores, seconds, name, why):
    choice = choose.choose(asked, tiny_federation(), seconds, cores=cores)
    assert choice.name == name
    assert why in choice.why
    assert choice.threads == 1
    assert choice.processes == (1 if name == "sequential" else min(cores, 4))


def test_pooled_samples_use_all_cores_as_threads():
    choice = choose.choose("auto", tiny_federation([Union()]), 1e6, cores=8)
    assert (choice.name, choice.threads, choice.why) == ("sequential", 8, "one client trains in a round")


def test_what_does_not_fit_the_device_is_refused():
    with pytest.raises(ConfigError, match="slots needs a GPU"):
        choose.choose("slots", tiny_federation())
    with pytest.raises(ConfigError, match="Did you mean 'workers'"):
        choose.choose("worker", tiny_federation())


def test_settling_changes_the_engine_and_no_number():
    fed = tiny_federation([Scaffold()])
    choice = choose.choose("workers", fed, workers=1)
    choice.settle(fed)
    assert isinstance(fed.engine, Workers)
    assert fed.engine.pool.count == 1
    for _ in range(2):
        fed.round()
    said = choice.record(fed)
    fed.engine.close()
    assert not differences(fed, run_tiny([Scaffold()]))
    assert said == {"engine": "workers", "why": "asked for", "device": "cpu", "devices": ["cpu"], "processes": 1, "threads": 1,
                    "layout": "contiguous", "precision": "float32", "notes": []}


def test_settling_sets_the_threads():
    before = torch.get_num_threads()
    try:
        Choice("sequential", "", Sequential, threads=2).settle(tiny_federation())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- estimates -------------------------------------------------------------------------------------------------------

def test_steps_of_a_round():
    # sizes 24, 17, 5, 40; batches of 8; two epochs: 2 (3 + 2 + 0 + 5) = 20 steps; with half the clients, 10 on average
    assert estimate.steps_per_round(tiny_federation()) == 20
    assert estimate.steps_per_round(tiny_federation(participation=0.5)) == 10
    assert estimate.steps_per_round(tiny_federation(last_batch="keep")) == 2 * (3 + 2 + 1 + 5)       # 17 = 8 + 8 + 1: too small
    assert estimate.steps_per_round(tiny_federation([Union()])) == 2 * (86 // 8)


def test_how_many_clients_are_visited():
    # two of four a round: after one round 2, after two 4 (1 − 1/4) = 3; plus one for safety, never above all
    fed = tiny_federation(participation=0.5)
    assert [estimate.visits(fed, r) for r in (1, 2, 50)] == [3, 4, 4]
    assert estimate.visits(tiny_federation([Mr()], participation=0.5), 1) == 4           # all are asked before round one


def test_measuring_a_step_touches_nothing():
    fed = tiny_federation([Scaffold(), Mr()])
    before = {k: t.clone() for k, t in state_of(fed).items()}
    assert min(estimate.time_client(fed)) > 0
    assert all(torch.equal(t, before[k]) for k, t in state_of(fed).items())
    assert fed.engine.slots == {}


def test_what_counts(tmp_path):
    fed = tiny_federation([Scaffold()])
    state = tree.count_bytes(fed.clients.fresh.tensors)
    plain = estimate.estimate(fed, 10)
    assert plain.memory["states"] == 4 * state
    assert plain.memory["data"] == tree.count_bytes({"x": fed.population.x, "y": fed.population.y})
    assert plain.disk_bytes == 0
    assert plain.seconds is None
    timed = estimate.estimate(fed, 10, processes=2, workers=True, kept=True, step_seconds=0.5)
    assert timed.seconds == 20 * 0.5 / 2
    assert timed.memory_bytes > plain.memory_bytes + 2 * estimate.PROCESS
    assert timed.disk["checkpoints"] > 3 * 4 * state
    fed.clients = DiskStore(fed.clients.fresh, tmp_path)
    kept = estimate.estimate(fed, 10, kept=True)
    assert "states" not in kept.memory
    assert kept.disk["states"] >= 4 * state
    assert kept.disk["checkpoints"] < timed.disk["checkpoints"]
    assert "of memory" in timed.line()
    assert "5.0 s of training a round" in timed.line()
    assert timed.record()["steps_per_round"] == 20


def test_mapped_data_need_no_memory(tmp_path):
    fed = tiny_federation()
    (tmp_path / "x").write_bytes(b"\0" * 4096)
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=1024)
    assert estimate._in_memory(x, fed.population.y) == fed.population.y.numel() * 8


@pytest.mark.parametrize(("what", "advice"), [("data", "map_data=true"), ("states", "on disk"), ("workers", "fewer workers"),
                                              ("round", "participation")])
def test_too_little_memory_is_refused_with_advice(what, advice, monkeypatch):
    monkeypatch.setattr(estimate, "available_memory", lambda: 8 * GIB)
    estimate.refuse_what_cannot_fit(estimate.Estimate({what: 7 * GIB}))
    with pytest.raises(ConfigError, match="needs about 10 GiB of memory and 8 GiB are free") as caught:
        estimate.refuse_what_cannot_fit(estimate.Estimate({what: 9 * GIB, "process": GIB}))
    assert advice in str(caught.value)


def test_too_little_disk_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(estimate, "free_disk", lambda folder: GIB)
    with pytest.raises(ConfigError, match="2 GiB of disk and 1 GiB are free"):
        estimate.refuse_what_cannot_fit(estimate.Estimate({}, {"states": 2 * GIB}), tmp_path)


def test_states_go_to_disk_where_they_would_fill_the_memory(monkeypatch, tmp_path):
    fed = tiny_federation([Scaffold()])
    need = estimate.states_bytes(fed, 100)
    monkeypatch.setattr(estimate, "available_memory", lambda: 5 * need)
    assert estimate.choose_store(fed, 100) is MemoryStore
    monkeypatch.setattr(estimate, "available_memory", lambda: 3 * need)
    made = estimate.choose_store(fed, 100, tmp_path)(fed.clients.fresh)
    assert isinstance(made, DiskStore)
    assert made.folder == tmp_path


def test_hardware_answers():
    assert hardware.usable_cores() >= 1
    memory = hardware.available_memory()
    assert memory is None or 2**20 < memory < 2**60
    assert hardware.free_disk(Path("no/such/folder/yet")) > 0
