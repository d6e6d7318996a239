"""Clients' states in a file of the run's folder: the same run as with states in memory, wherever it goes on or is used."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tests.runs.test_folder import Stop, crash_after, models, records

import consilience
from consilience import tree
from consilience.engines.store import FILE, INDEX, DiskStore
from consilience.errors import DataError
from consilience.parts.registry import PARTS
from consilience.runs import folder as folders
from consilience.runs import states, use
from consilience.runs.export import export, load_exported
from consilience.runs.measure import measure
from consilience.runs.onboard import onboard
from consilience.runs.reload import open_run
from consilience.runs.run import Listener
from consilience.testing import tiny_federation, trial

SETTINGS = {"data": "synthetic(samples=160, classes=3, clients=4, size=8)", "model": "digits_cnn", "rounds": 5, "lr": 0.1,
            "validation": 0.2, "participation": 0.5}


def finish(folder: Path, method: str = "scaffold+ditto", **more) -> consilience.Result:
    return consilience.run(method, out=folder, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same run with states in memory and on disk."""
    at = tmp_path_factory.mktemp("both")
    for store in ("memory", "disk"):
        finish(at / store, store=store)
    return at


def test_a_run_is_the_same_wherever_its_states_lie(both):
    assert records(both / "memory") == records(both / "disk")
    assert models(both / "memory") == models(both / "disk")
    assert len(models(both / "disk")) == 2 * (1 + 4)
    for name, other in (("memory", "disk"), ("disk", "memory")):
        newest = max((both / name / "checkpoints").iterdir())
        assert (newest / INDEX).is_file() == (name == "disk")
        assert json.loads((both / name / "environment.json").read_text())["store"] == name
        config = json.loads((both / name / "config.json").read_text())
        assert config["places"]["store"] == name
        assert config["config"] == json.loads((both / other / "config.json").read_text())["config"]
    state = DiskStore(open_run(both / "disk").federation.clients.fresh).record_bytes
    assert (both / "disk" / states.FOLDER / FILE).stat().st_size % state == 0
    tensors = (max((both / "disk" / "checkpoints").iterdir()) / "state.safetensors").stat().st_size
    assert tensors < (max((both / "memory" / "checkpoints").iterdir()) / "state.safetensors").stat().st_size


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Runs that were interrupted after their checkpoint of round 3, with states in memory and on disk."""
    at = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))
        crash_after(patch, 3)
        for store in ("memory", "disk"):
            with pytest.raises(Stop):
                finish(at / store, store=store)
    return at


@pytest.mark.parametrize(("began", "asked", "goes_on"), [("disk", "auto", "disk"), ("memory", "auto", "memory"),
                                                         ("disk", "memory", "memory"), ("memory", "disk", "disk")])
def test_it_goes_on_elsewhere(both, cut, tmp_path, began, asked, goes_on):
    """From an archive of the folder, in another place; by itself as it began, or with the other store where that is asked for."""
    archive = shutil.make_archive(str(tmp_path / "archive"), "tar", cut / began)
    shutil.unpack_archive(archive, tmp_path / "there", filter="data")
    result = finish(tmp_path / "there", store=asked)
    assert isinstance(result.federation.clients, DiskStore) == (goes_on == "disk")
    assert records(tmp_path / "there") == records(both / "memory")
    assert models(tmp_path / "there") == models(both / "memory")


def break_index(folder: Path) -> None:
    at = max((folder / "checkpoints").iterdir()) / INDEX
    at.write_bytes(at.read_bytes()[:-9])


def other_index(folder: Path) -> None:
    old, new = sorted((folder / "checkpoints").iterdir())
    shutil.copy(old / INDEX, new / INDEX)


@pytest.mark.parametrize("damage", [
    break_index, other_index,
    lambda folder: (max((folder / "checkpoints").iterdir()) / INDEX).unlink(),
    lambda folder: os.truncate(folder / states.FOLDER / FILE, 100),
    lambda folder: (folder / states.FOLDER / FILE).write_bytes(os.urandom((folder / states.FOLDER / FILE).stat().st_size)),
    lambda folder: shutil.rmtree(folder / states.FOLDER),
], ids=["short index", "another's index", "no index", "short file", "noise", "no file"])
def test_damage_is_passed_over(both, cut, tmp_path, damage):
    """The checkpoint before is used, or, where the states themselves are gone, the run begins again; the end is the same."""
    shutil.copytree(cut / "disk", tmp_path / "r")
    damage(tmp_path / "r")
    finish(tmp_path / "r", store="disk")
    assert records(tmp_path / "r") == records(both / "disk")
    assert models(tmp_path / "r") == models(both / "disk")


def test_many_states_are_checked_when_read(cut, tmp_path, monkeypatch):
    """Beyond what can be read at once, damage is found when the client is next visited, and said."""
    monkeypatch.setattr("consilience.engines._records.CHECK_AT_ONCE", 0)
    shutil.copytree(cut / "disk", tmp_path / "r")
    file = tmp_path / "r" / states.FOLDER / FILE
    file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    with pytest.raises(DataError, match="does not match its checksum"):
        finish(tmp_path / "r", store="disk")


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(both, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))

    class Stopping(Listener):
        rounds = 0

        def round_done(self, record):
            self.rounds += 1

        def client_done(self, done, of):
            if self.rounds == 3 and done == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(tmp_path / "r", store="disk", listener=Stopping())
    finish(tmp_path / "r", store="disk")
    assert records(tmp_path / "r") == records(both / "disk")
    assert models(tmp_path / "r") == models(both / "disk")


@pytest.mark.parametrize("which", ["final", "best"])
def test_what_was_trained_can_be_used(both, tmp_path, which):
    """Exported, asked, measured and joined by a newcomer, the run on disk gives what the run in memory gives."""
    x = torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 1, 8, 8)
    said = {}
    for store in ("memory", "disk"):
        export(both / store, tmp_path / f"{store}.safetensors", client="2", which=which)
        model = load_exported(tmp_path / f"{store}.safetensors")
        new = onboard(both / store, "synthetic(samples=40, classes=3, size=8, seed=7)", epochs=1, which=which)
        predicted = use.predict(both / store, "synthetic(samples=20, classes=3, size=8)", client="1", which=which)
        measured = measure(open_run(both / store), ["drift", "accuracy"], keep=lambda path, entries: None)
        said[store] = (model(model.prepare(x)).tolist(), new.report | {"measured": None}, predicted | {"measured": None},
                       {k: v["result"] for k, v in measured.items()})
    assert said["memory"] == said["disk"]


def test_a_finished_run_is_used_from_a_read_only_disk(both, tmp_path, monkeypatch):
    real = open

    def refuse(path, mode="r", *args, **kwargs):
        if str(path).startswith(str(tmp_path / "r")) and ("+" in mode or "w" in mode):
            raise OSError(30, "Read-only file system")
        return real(path, mode, *args, **kwargs)
    shutil.copytree(both / "disk", tmp_path / "r")
    monkeypatch.setattr("builtins.open", refuse)
    assert use.served(use.open_finished(tmp_path / "r"), "3").client == "3"


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_many_clients_have_no_file_each(both, tmp_path, monkeypatch, store):
    """Above a number of clients best/ holds their tensors together, and final/ none: the last checkpoint has them."""
    for module in (states, folders, use):
        monkeypatch.setattr(module, "MOST_FILES", 3)
    finish(tmp_path / "r", store=store)
    assert {p.name for p in (tmp_path / "r" / "final").iterdir()} == {"global.safetensors"}
    assert {p.name for p in (tmp_path / "r" / "best").iterdir()} == {"global.safetensors", INDEX if store == "disk" else states.TOGETHER}
    for which in ("final", "best"):
        many = use.open_finished(tmp_path / "r", which).federation
        with monkeypatch.context() as few:
            few.setattr(use, "MOST_FILES", 1000)
            one = use.open_finished(both / "memory", which).federation
        for number in range(4):
            a, b = (dict(states.own_tensors(fed, fed.client(number))) for fed in (many, one))
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) for k in a)


def test_the_best_states_outlive_interruptions(cut, both, tmp_path, monkeypatch):
    """Records that only best/ refers to are not given to others when the run goes on."""
    for module in (states, folders, use):
        monkeypatch.setattr(module, "MOST_FILES", 3)
    monkeypatch.setattr(folders, "CHECKPOINT_SHARE", float("inf"))
    best = finish(tmp_path / "whole", store="disk", rounds=8).summary()["best_by_validation"]["round"]
    with monkeypatch.context() as crash:
        crash_after(crash, best + 1 if best < 7 else best)
        with pytest.raises(Stop):
            finish(tmp_path / "r", store="disk", rounds=8)
    finish(tmp_path / "r", store="disk", rounds=8)
    a, b = (use.open_finished(tmp_path / name, "best").federation for name in ("r", "whole"))
    for number in range(4):
        assert all(torch.equal(x, y) for x, y in zip(states.own_tensors(a, a.client(number)).values(),
                                                     states.own_tensors(b, b.client(number)).values()))


@pytest.mark.parametrize("name", ["apfl", "moreau", "apple", "ditto", "per"])
def test_models_that_serve_clients_are_among_what_best_holds(name):
    """What APFL, pFedMe and APPLE serve by is kept by the part, and moves on after the best round."""
    fed = tiny_federation([trial(PARTS[name])])
    fed.round()
    then = {n: (states.own_tensors(fed, fed.client(n)), tree.clone(fed.personal_model(n)[0])) for n in range(fed.size)}
    model = fed.model
    fed.round()
    moved = fed.personal_model(0)[0]["params"]
    assert any(not torch.equal(moved[k], t) for k, t in then[0][1]["params"].items())
    fed.model = model
    for number, (own, served) in then.items():
        fed.clients.put(number, states.with_own(fed, fed.client(number), own))
        back = dict(tree.paths(fed.personal_model(number)[0]))
        assert all(torch.equal(back[path], t) for path, t in tree.paths(served)), number


def test_a_client_that_came_after_the_best_round_was_served_the_global_model_then():
    fed = tiny_federation([trial(PARTS["moreau"])])
    fed.round([0])
    own, model = states.own_tensors(fed, fed.client(1)), fed.model
    fed.round([0, 1])
    fed.model = model
    fed.clients.put(1, states.with_own(fed, fed.client(1), own))
    served = fed.personal_model(1)[0]["params"]
    assert all(torch.equal(served[k], t) for k, t in model["params"].items())


def test_without_a_folder_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    settings = {k: v for k, v in SETTINGS.items() if k != "validation"}
    result = consilience.run("scaffold", store="disk", **settings)
    assert result.measured["store"] == "disk"
    assert not list(tmp_path.iterdir())                     # it has no name even while it is in use
    assert result.federation.client(result.federation.cohort(5)[0]).first is False
    del result
    gc.collect()
    other = consilience.run("scaffold", store="memory", **settings)
    assert other.measured["store"] == "memory"
