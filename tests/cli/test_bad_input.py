"""Bad input of every kind, end to end: a clear message and exit code, or a documented behaviour; never NaN in silence."""

from __future__ import annotations

import json

import numpy as np
import pytest

TINY = ("--data", "synthetic(samples=160, classes=3, clients=4, features=6)", "--rounds", "2", "--lr", "0.1")


def arrays(path, sizes, labels, features=5) -> str:
    """An .npz file whose clients have these many samples."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    draw = np.random.default_rng(0)
    np.savez(path, x=draw.normal(size=(len(owner), features)).astype(np.float32), y=labels(len(owner)), client=owner)
    return f"arrays(path='{path.name}')"


def test_unknown_names_offer_the_nearest(cli):
    assert "'scaffold'" in cli("run", "scafold", code=2).err
    assert "'digits'" in cli("run", "fedavg", "--data", "digit", code=2).err
    assert "'kappa'" in cli("run", "dbe", "--set", "dbe.kapa=1", code=2).err
    assert "'mr'" in cli("explain", "mrr", code=2).err


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_method_named_twice_is_refused(cli, command):
    """It used to be passed over in silence."""
    assert "-o method=" in cli(command, "fedavg", "-o", "method=dbe", *TINY, code=2).err


def test_numbers_without_end_are_called_so(cli):
    assert "must be finite. Got inf" in cli("run", "fedavg", "--lr", "inf", code=2).err


def test_refused_combination_says_why(cli):
    said = cli("run", "local+scaffold", *TINY, code=2).err
    assert "scaffold and local cannot be combined" in said
    assert "no global model" in said


def test_client_without_data(cli, tmp_path):
    """A split by hand can leave a client nothing to train on; a data set as such has no empty clients. Here: a client of one sample."""
    source = arrays(tmp_path / "few.npz", [40, 40, 1], lambda n: np.arange(n) % 2)
    said = cli("run", "fedavg", "--data", source, "--rounds", "1", "--json")
    assert "1 of 3 clients has fewer samples than a batch of 10 and will never train: 2" in said.err
    record = said.json()["records"][-1]
    assert record["idle"] == ["2"]
    assert set(record["losses"]) == {"0", "1"}


def test_a_model_beyond_the_memory(cli):
    """PyTorch's own words, under a traceback, for a digit too many."""
    huge = ("--model", "mlp(hidden=9999999999999)")
    said = cli("run", "fedavg", *TINY, *huge, code=2).err
    assert "memory does not suffice" in said
    assert "GB were asked for at once. Use a smaller model" in said
    assert "memory does not suffice" in cli("compare", "fedavg", "scaffold", "--seeds", "1", *TINY, *huge, code=2).err
    for digits in (18, 20):                                     # more bytes than can be counted; a number that none has
        said = cli("run", "fedavg", *TINY, "--model", f"mlp(hidden={'9' * digits})", code=2).err
        assert "memory does not suffice: more was asked for at once than any machine has. Use a smaller model" in said


def test_no_client_can_fill_a_batch(cli, tmp_path):
    source = arrays(tmp_path / "few.npz", [6, 6], lambda n: np.arange(n) % 2)
    assert "Every client has fewer samples than a batch of 10" in cli("run", "fedavg", "--data", source, "--rounds", "1", code=2).err
    kept = cli("run", "fedavg", "--data", source, "--rounds", "1", "-o", "last_batch=keep", "--json").json()
    assert kept["records"][0]["idle"] == []


def test_class_absent_everywhere(cli, tmp_path):
    """Classes that nobody has: a warning, a run, and finite scores, also for parts that count classes."""
    source = arrays(tmp_path / "gap.npz", [40, 40], lambda n: np.arange(n) % 2).replace("')", "', classes=4)")
    for method in ("fedavg", "fedfm", "lfd"):
        said = cli("run", method, "--data", source, "--rounds", "2", "--json")
        assert "No client has training samples of class 2, 3" in said.err
        assert all(np.isfinite(r["loss"]) for r in said.json()["records"] if r["round"])


def test_one_client_only(cli):
    said = cli("run", "fedavg", "--data", "synthetic(samples=60, clients=1, features=4, classes=2)", "--rounds", "1", "--json")
    assert "There is only one client" in said.err
    assert "at least two clients" in cli("run", "dann", "--data", "synthetic(samples=60, clients=1, features=4, classes=2)", code=2).err


def test_maps_of_one_position_for_ffa(cli, tmp_path, monkeypatch):
    (tmp_path / "flat_maps.py").write_text(
        "from torch import nn\n"
        "def make(sample, classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(4, classes))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = cli("run", "fedfa", "--model", "flat_maps:make", "--taps", "head=3,stages=0", "--rounds", "1", "--clients", "3", code=2).err
    assert "ffa" in said
    assert "1" in said
    assert "stage" in said or "map" in said


def test_no_maps_at_all_for_ffa(cli):
    assert "ffa" in cli("run", "fedfa", *TINY, code=2).err


def test_no_batchnorm_for_fedbn(cli):
    said = cli("run", "fedbn", *TINY, "--model", "mlp", code=2).err
    assert "BatchNorm" in said
    assert "fedavg" in said


def test_batch_of_one_for_ffa(cli):
    assert "batch" in cli("run", "fedfa", "--batch", "1", "--rounds", "1", code=2).err


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_non_finite_loss_stops_and_keeps_the_records(cli, tmp_path, method):
    """A step that grows without bound ends the run with exit code 3, naming client, round and step; earlier rounds stay."""
    schedule = "schedule=step(every=2, gamma=1e30)"           # harmless for two rounds, hopeless in the third
    said = cli("run", method, *TINY, "--rounds", "6", "-o", schedule, "--out", "r", code=3).err
    assert "ound 3" in said
    assert "client" in said
    assert "step" in said
    kept = [json.loads(line) for line in (tmp_path / "r" / "records.jsonl").read_text().splitlines()]
    assert [r["round"] for r in kept] == [1, 2]
    assert not (tmp_path / "r" / "done").exists()
    again = cli("resume", "r", code=3).err                    # it stops in the same place
    assert "ound 3" in again


def test_a_folder_that_is_not_ours(cli, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "holds files, but no run of ours" in cli("run", "fedavg", *TINY, "--out", "full", code=2).err
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    assert "holds no run" in cli("resume", "full", code=2).err
    assert "holds no run" in cli("export", "absent", code=2).err


@pytest.mark.parametrize("content", ['{"model_type": "bert"}', '{"config": "mine", "data": {}}', "[1, 2]"])
@pytest.mark.parametrize("records", [False, True])
def test_a_configuration_that_is_not_ours(cli, tmp_path, content, records):
    """Other programs call their files so, too; theirs is not written over."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(content)
    if records:
        (tmp_path / "full" / "records.jsonl").write_text("{}\n")
    assert "holds files, but no run of ours" in cli("run", "fedavg", *TINY, "--out", "full", code=2).err
    assert (tmp_path / "full" / "config.json").read_text() == content


def test_another_configuration_in_the_folder(cli):
    cli("run", "fedavg", *TINY, "--out", "r")
    said = cli("run", "fedavg", *TINY, "--lr", "0.2", "--out", "r", code=2).err
    assert "lr = 0.1, not 0.2" in said
    assert "--again" in said
    cli("run", "fedavg", *TINY, "--lr", "0.2", "--out", "r", "--again")


def test_a_setting_that_is_typed_twice(cli, tmp_path):
    """-o lost without a word: the run had another learning rate than its user believed."""
    assert "'lr' is set twice: by --lr 0.1 and by -o lr=0.2" in cli("run", "fedavg", *TINY, "-o", "lr=0.2", code=2).err
    assert "'eval_every' is set twice: by --eval-every 2" in cli("compare", "fedavg", *TINY, "--eval-every", "2", "-o", "eval_every=1",
                                                                 code=2).err
    (tmp_path / "c.toml").write_text("momentum = 0.5")                        # the command line goes before a file
    assert cli("run", "fedavg", *TINY, "--config", "c.toml", "-o", "momentum=0.9", "--out", "r",
               "--json").json()["config"]["momentum"] == 0.9


def test_the_method_may_stand_in_the_file(cli, tmp_path):
    (tmp_path / "c.toml").write_text('method = "fedprox"\nsettings = { "prox.mu" = 0.5 }')
    config = cli("run", *TINY, "--config", "c.toml", "--json").json()["config"]
    assert (config["method"], config["settings"]) == ("fedprox", {"prox.mu": 0.5})
    assert cli("run", "prox+dbe", *TINY, "--config", "c.toml", "--json").json()["config"]["method"] == "dbe+prox"
    for command in ("run", "sweep"):
        assert "Which method? Name it" in cli(command, *TINY, code=2).err


def test_a_wrong_setting_names_the_file_that_it_stands_in(cli, tmp_path):
    (tmp_path / "c.toml").write_text("rounds = -1")
    for command in ("run", "compare", "sweep"):
        said = cli(command, "fedavg", "--config", "c.toml", code=2).err
        assert "Error: c.toml: The 'rounds' option of the run must be at least 1" in said
    (tmp_path / "c.toml").write_text("momentum = 0.5")
    assert "Error: The 'rounds' option" in cli("run", "fedavg", "--config", "c.toml", "--rounds", "-1", code=2).err      # not the file's
