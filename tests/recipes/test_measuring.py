"""Measures are taken of a run as soon as it has ended; what stops or breaks them leaves the run as it is."""

from __future__ import annotations

import importlib
import time

import pytest
from tiny_recipe import TINY, entry, load_tiny

from consilience.metrics.measures.local import Forgetting
from consilience.recipes.collect import collect
from consilience.recipes.folders import HALFWAY, MEASURES, known_measures
from consilience.recipes.load import load_recipe
from consilience.recipes.measuring import TakeMeasures, take_measures
from consilience.recipes.run import Order, reproduce
from consilience.runs.config import RunConfig
from consilience.runs.files import read_json, write_json
from consilience.runs.listener import Watcher
from consilience.runs.many import LATE, _attempt

many = importlib.import_module("consilience.runs.many")
measure_module = importlib.import_module("consilience.runs.measure")
measuring = importlib.import_module("consilience.recipes.measuring")
KEPT = Order((), ("accuracy", "kept"), 1, 0.25)
DBE = Order(("dbe",), ("accuracy", "kept"), 1, 0.25)
MDL = "mdl(points=3, seeds=2, steps=4, hidden=8)"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    recipe = load_tiny(folder)
    return recipe, reproduce(recipe, folder / "out", KEPT, jobs=1)


class Ear(Watcher):
    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []

    def noted(self, label: str, note: str) -> None:
        self.notes.append((label, note))


def test_a_run_is_measured_before_the_next_begins(whole, tmp_path):
    """Whatever ends the command after the first run finds its measure taken. It used to be taken after the last."""
    class Killed(BaseException):
        pass

    def finished(piece, outcome):
        raise Killed
    ear = Ear()
    with pytest.raises(Killed):
        reproduce(whole[0], tmp_path, KEPT, jobs=1, finished=finished, watcher=ear)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert entry(collect(whole[0], tmp_path / "runs", KEPT), "fedavg", "kept").values == entry(whole[1], "fedavg", "kept").values
    # four clients train for the measure, and each step of it can be heard
    assert ("FedAvg, accuracy, seed 0", "forgetting: local training 4 of 4") in ear.notes


def test_processes_measure_what_they_ran_and_say_so(whole, tmp_path):
    ear = Ear()
    outcome = reproduce(whole[0], tmp_path, KEPT, jobs=2, watcher=ear)
    for row in ("fedavg", "dbe"):
        assert entry(outcome, row, "kept").values == entry(whole[1], row, "kept").values
    assert {label for label, _ in ear.notes} <= {"FedAvg, accuracy, seed 0", "FedAvg+DBE, accuracy, seed 0"}
    assert any(note for _, note in ear.notes)                     # looked at four times a second, so which ones is chance


def _stop_after(monkeypatch, module, looks: int) -> float:
    """A clock that jumps past the end when it has been looked at so many times."""
    limit, seen = time.time() + 3600, []

    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time():
            seen.append(1)
            return limit + 1 if len(seen) > looks else time.time()
    monkeypatch.setattr(module, "time", Clock)
    return limit


def test_a_measure_for_which_time_is_up_is_left_for_the_next_command(whole, tmp_path, monkeypatch):
    limit = _stop_after(monkeypatch, measure_module, 2)
    cut = reproduce(whole[0], tmp_path, DBE, jobs=1, until=limit)
    monkeypatch.undo()
    assert entry(cut, "dbe", "kept").states == {0: "not measured"}
    assert entry(cut, "dbe", "kept").state == "not measured"
    assert "not measured" in cut.table().plain()
    assert entry(cut, "dbe", "accuracy").values == entry(whole[1], "dbe", "accuracy").values
    monkeypatch.setattr(many, "run_config", None)                 # nothing is trained again
    after = reproduce(whole[0], tmp_path, DBE, jobs=1)
    assert entry(after, "dbe", "kept").values == entry(whole[1], "dbe", "kept").values
    assert entry(after, "dbe", "kept").states == {0: "done"}


def test_a_seed_without_a_value_is_named_beside_those_that_have_one(whole, tmp_path):
    some = reproduce(whole[0], tmp_path, DBE, jobs=1)
    kept = entry(some, "dbe", "kept")
    kept.states |= {1: "not measured", 2: "failed: it broke", 3: "not run", 4: "not measured"}
    (shown,) = some.table(columns=["kept"], rows=["dbe"]).rows
    assert shown[3] == f"{kept.values[0]:.{kept.cell.digits}f} (seeds 1, 4: not measured, seed 2: failed)"


def test_a_long_measure_goes_on_where_it_was_stopped(whole, monkeypatch):
    """Six probes of four steps; the clock is looked at once at the start, once when models were asked, and after every probe."""
    folder = entry(whole[1], "fedavg", "kept").runs[0].path
    failed: dict[str, str] = {}
    take_measures(folder, [MDL], failed)
    undisturbed = read_json(folder / MEASURES)
    write_json(folder / MEASURES, {k: v for k, v in undisturbed.items() if k != MDL})
    limit = _stop_after(monkeypatch, measure_module, 5)
    take_measures(folder, [MDL], failed, until=limit)
    monkeypatch.undo()
    assert MDL not in known_measures(folder)
    found = read_json(folder / HALFWAY)[MDL]
    assert 1 <= len(found) < 6
    heard: list[str] = []
    take_measures(folder, [MDL], failed, heard.append)
    assert f"mdl: probe steps {4 * len(found)} of 24" in heard
    assert "mdl: probe steps 0 of 24" not in heard
    assert known_measures(folder)[MDL]["result"] == undisturbed[MDL]["result"]
    assert not (folder / HALFWAY).exists()
    assert failed == {}


def test_a_measure_that_fails_loses_neither_the_run_nor_the_others(whole, tmp_path, monkeypatch):
    def broken(self, s):
        raise RuntimeError("out of memory")
    monkeypatch.setattr(Forgetting, "measure", broken)
    (tmp_path / "two.toml").write_text(TINY + '[columns.far]\ntitle = "far"\nunit = ""\n'
                                       'score = { measure = "drift", value = "whole.absolute" }\n', encoding="utf-8")
    outcome = reproduce(load_recipe(tmp_path / "two.toml"), tmp_path, Order(("dbe",), ("accuracy", "kept", "far"), 1, 0.25), jobs=1)
    assert entry(outcome, "dbe", "kept").states == {0: "failed: RuntimeError: out of memory"}
    assert entry(outcome, "dbe", "accuracy").states == {0: "done"}
    assert entry(outcome, "dbe", "accuracy").values == entry(whole[1], "dbe", "accuracy").values
    assert entry(outcome, "dbe", "far").values[0] > 0
    monkeypatch.undo()
    folder = entry(outcome, "dbe", "kept").runs[0].path
    for checkpoint in sorted((folder / "checkpoints").glob("*/state.safetensors")):
        checkpoint.unlink()                                       # as in an archive without tensors
    after = reproduce(whole[0], tmp_path, DBE, jobs=1)
    assert entry(after, "dbe", "kept").states[0].startswith("failed: No checkpoint")
    assert entry(after, "dbe", "accuracy").states == {0: "done"}


def test_time_is_kept_for_measures_by_what_they_took_before(tmp_path, monkeypatch):
    """Two runs took 30 and 50 seconds: 50 are kept, but no more than a tenth of the 100 allowed."""
    for name, seconds in (("a", 30.0), ("b", 50.0)):
        write_json(tmp_path / name / MEASURES, {"cka": {"round": 1, "result": {}, "seconds": seconds}, "kl": {"round": 1, "result": {}}})
    mine = str(tmp_path / "mine")
    assert TakeMeasures(("cka", "kl"), 3600.0).reserve(mine) == 50.0
    assert TakeMeasures(("cka",), 100.0).reserve(mine) == 10.0
    assert TakeMeasures(("kl",), 100.0).reserve(mine) == 0.0
    # a run is not begun in the time that is kept, and a short measure not where it cannot end; a long one is, for it goes on later
    config = RunConfig.make({"data": "digits", "clients": 2, "rounds": 1})
    assert _attempt(config.flat(), mine, False, lambda n: None, time.time() + 40, TakeMeasures(("cka",), 3600.0)) == (LATE, [])
    now = time.time()
    assert not measuring._has_time(tmp_path / "mine", "cka", now + 40)
    assert measuring._has_time(tmp_path / "mine", "cka", now + 4000)
    write_json(tmp_path / "a" / MEASURES, {MDL: {"round": 1, "result": {}, "seconds": 500.0}})
    assert measuring._has_time(tmp_path / "mine", MDL, now + 40)
    assert not measuring._has_time(tmp_path / "mine", MDL, now - 1)
