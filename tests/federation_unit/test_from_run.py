"""The path from a simulation to a federation: the same method, the same model, the same rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import consilience
from consilience.data import load
from consilience.errors import ConfigError, DataError
from consilience.federation.app import init
from consilience.federation.demo import simulate
from consilience.federation.from_run import cut_of, read_run
from consilience.federation.site import load_site

WARDS = ("east", "north", "south")
CUT = {"train": 0.6, "validation": 0.2}


@pytest.fixture(autouse=True)
def _wards(tmp_path, monkeypatch):
    """One file with all wards for the simulation, one for each as the sites have them; the last lacks a class."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    lines = {ward: [f"{a:.3f},{b:.3f},{'ill' if a > 0 and ward != 'south' else 'well'}" for a, b in draw.normal(size=(20, 2))]
             for ward in WARDS}
    with open("all.csv", "w") as file:
        file.write("ward,a,b,dx\n" + "".join(f"{ward},{line}\n" for i in range(20) for ward in WARDS for line in [lines[ward][i]]))
    for ward in WARDS:
        with open(f"{ward}.csv", "w") as file:
            file.write("a,b,dx\n" + "".join(f"{line}\n" for line in lines[ward]))


def test_a_site_has_the_rows_of_its_client():
    whole = load("table(path='all.csv', label=dx, client=ward)", seed=3, **CUT)
    for number, (client, ward) in enumerate(zip(whole.clients, WARDS)):
        own = load_site(f"table(path='{ward}.csv', label=dx, train=0.6, validation=0.2, seed=3)", number=number,
                        class_names=("ill", "well"))
        for theirs, mine in zip(client[1:], own.clients[0][1:]):
            assert torch.equal(whole.x[theirs], own.x[mine])
            assert torch.equal(whole.y[theirs], own.y[mine])


def test_a_run_becomes_a_federation_with_its_numbers(tmp_path):
    """Settings, default model and rows come from the run's folder; the sites' files then give the run's parameters, bit for bit."""
    torch.set_num_threads(1)
    result = consilience.run("scaffold+dbe", "table(path='all.csv', label=dx, client=ward)", rounds=2, batch=4, lr=0.03, seed=3,
                             engine="sequential", device="cpu", settings={"dbe.kappa": 5}, out="run", **CUT)
    run = read_run("run")
    settings = init("hospitals", run.values, like=run.like, name_of_data=run.name)
    assert (settings.agreed.sites, settings.agreed.sample, settings.agreed.class_names) == (3, (2,), ("ill", "well"))
    assert settings.run.stack().canonical == "dbe+scaffold"
    assert "train=0.6, validation=0.2, seed=3" in cut_of(run)
    with open(f"{WARDS[1]}.csv") as file:             # a hospital whose table has its columns in another order
        turned = [",".join((b, a, dx)) for a, b, dx in (line.strip().split(",") for line in file)]
    with open(f"{WARDS[1]}.csv", "w") as file:
        file.write("\n".join(turned) + "\n")
    sites = [load_site(f"table(path='{ward}.csv', label=dx, {run.cut})", number=i, class_names=settings.agreed.class_names,
                       feature_names=settings.agreed.feature_names) for i, ward in enumerate(WARDS)]
    same = simulate(settings, sites)
    assert [k for k in result.global_model if not torch.equal(result.global_model[k], same.global_model[k])] == []


def test_a_run_on_tokens_keeps_its_vocabulary():
    """The sites' files may lack the largest number, so it is the run that says how many there are."""
    draw = np.random.default_rng(0)
    np.savez("words.npz", x=draw.integers(0, 50, (40, 6)), y=np.arange(40) % 2)
    consilience.run("fedavg", "arrays(path='words.npz')", split="iid", clients=2, rounds=1, batch=4, engine="sequential", out="run")
    np.savez("few.npz", x=np.zeros((4, 6), np.int64), y=[0, 1, 0, 1])
    run = read_run("run")
    settings = init("hospitals", run.values, like="arrays(path='few.npz')", name_of_data=run.name)
    assert settings.agreed.vocabulary == 50


def test_what_belongs_to_the_simulation_alone_is_left_and_named():
    consilience.run("fedavg", "digits", split="iid", clients=2, rounds=1, steps=1, dropout=0.1, model="mlp(hidden=(4,))",
                    train_fraction=0.1, engine="sequential", out="run")
    run = read_run("run")
    assert run.left == ["train_fraction=0.1", "dropout=0.1"]
    assert "dropout" not in run.values
    assert "class_names" not in run.values            # the digits are whole numbers
    assert cut_of(run) == ""                          # digits are no site's data


def test_folders_that_hold_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path / "none")
    (tmp_path / "compared" / "fedavg-seed0").mkdir(parents=True)
    (tmp_path / "compared" / "fedavg-seed0" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"folder of runs.*name one of them, as '.*fedavg-seed0'"):
        read_run(tmp_path / "compared")
    (tmp_path / "config.json").write_text(json.dumps({"config": {"method": "fedavg"}}))
    with pytest.raises(DataError, match="not that of a run"):
        read_run(tmp_path)
