"""`consilience export`, `predict` and `onboard`."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

SOURCE = "synthetic(samples=160, classes=3, clients=4, features=6)"
RUN = ("run", "dbe", "--data", SOURCE, "--rounds", "2", "--lr", "0.1", "-o", "validation=0.2", "--out", "r")


@pytest.fixture
def run(cli):
    document = cli(*RUN, "--json").json()
    return next(iter(document["records"][-1]["personalised"]["per_client"]))


def test_export(cli, run, tmp_path):
    said = cli("export", "r", "-o", "models/m.safetensors").out
    assert "wrote models/m.safetensors and m.json" in said
    assert "load_state_dict" in said
    card = cli("export", "r", "--client", run, "--which", "best", "-o", "p.safetensors", "--json").json()
    assert card["which"] == "best"
    assert card == json.loads((tmp_path / "p.json").read_text())
    assert load_file(tmp_path / "p.personal.safetensors")["prbm/shift"].shape == tuple(card["personal"]["tensors"]["prbm/shift"])
    assert "nobody" in cli("export", "r", "--client", "nobody", code=2).err
    assert "'best'" in cli("export", "r", "--which", "bets", code=2).err


def test_predict(cli, run, tmp_path):
    rows = list(csv.DictReader(io.StringIO(cli("predict", "r", "--data", SOURCE, "--client", run).out)))
    assert len(rows) == 160
    assert "160 predictions in p.csv" in cli("predict", "r", "--data", SOURCE, "--client", run, "-o", "p.csv").out
    assert list(csv.DictReader((tmp_path / "p.csv").open())) == rows
    document = cli("predict", "r", "--data", SOURCE, "--json", "-o", "p.json").json()
    assert json.loads((tmp_path / "p.json").read_text()) == document
    assert sum(document["predictions"][0]["probabilities"].values()) == pytest.approx(1)
    assert ".csv" in cli("predict", "r", "--data", SOURCE, "-o", "p.xls", code=2).err
    assert "synthetic" in cli("predict", "r", "--data", "syntetic", code=2).err


@pytest.mark.parametrize("words", [("export",), ("predict", "--data", SOURCE), ("onboard", "--data", SOURCE)])
def test_a_federations_folder_is_told_from_a_run(cli, run, tmp_path, words):
    """The rows stay at the sites, so nobody changed any data."""
    (tmp_path / "r" / "federation.json").write_text("{}")
    said = cli(words[0], "r", *words[1:], code=2).err
    assert "federation over sites" in said
    assert "final/global.safetensors" in said
    assert "data set changed" not in said


def test_onboard(cli, run, tmp_path):
    said = cli("onboard", "r", "--data", SOURCE, "--epochs", "2").out
    assert "accuracy before" in said
    assert "initial personal tensors (prbm)" in said
    assert "Trained 2 epochs at " in said
    assert "Trained 1 epoch at " in cli("onboard", "r", "--data", SOURCE, "--epochs", "1").out
    assert (tmp_path / "personal.safetensors").is_file()
    document = cli("onboard", "r", "--data", SOURCE.replace(")", ", seed=5)"), "--json").json()
    assert document["epochs"] == 10
    assert document["after"]["accuracy"] > document["before"]["accuracy"]
    assert document["model"]["personal"]["file"] == "personal.personal.safetensors"
    assert "epochs" in cli("onboard", "r", "--data", SOURCE, "--epochs", "0", code=2).err


def test_what_cannot_be_written_is_printed_before_the_error(cli, run, tmp_path):
    """Hours may have gone into it."""
    for name in ("p.csv", "personal.safetensors"):
        (tmp_path / name).mkdir()
    rows = cli("predict", "r", "--data", SOURCE).out
    refused = cli("predict", "r", "--data", SOURCE, "-o", "p.csv", code=4)
    assert refused.out == rows
    assert "Cannot write 'p.csv'" in refused.err
    refused = cli("onboard", "r", "--data", SOURCE, "--epochs", "1", code=4)
    assert "accuracy after" in refused.out
    assert "wrote" not in refused.out
    assert "Cannot write 'personal.safetensors'" in refused.err
    assert cli("onboard", "r", "--data", SOURCE, "--epochs", "1", "--json", code=4).json()["model"] is None


def test_the_command_to_go_on_with_can_be_pasted(cli, run, tmp_path):
    (tmp_path / "r").rename(tmp_path / "a b")
    (tmp_path / "a b" / "done").unlink()
    assert "consilience resume 'a b'" in cli("export", "a b", code=2).err


def _broken(tensors, how):
    name = sorted(tensors)[0]
    return {"missing": {k: t for k, t in tensors.items() if k != name} or {"x": tensors[name]},
            "shape": {**tensors, name: torch.zeros(2, 2, 2)}, "kind": {**tensors, name: tensors[name].double()},
            "infinite": {**tensors, name: tensors[name] + float("inf")}}[how]


@pytest.mark.parametrize("how", ["missing", "shape", "kind", "infinite"])
@pytest.mark.parametrize("whose", ["global", "clients/{}"])
def test_best_models_that_are_damaged_or_of_another_run(cli, run, tmp_path, how, whose):
    """Other shapes and infinite numbers were taken without a word; a name that is missing ended in a traceback."""
    file = tmp_path / "r" / "best" / f"{whose.format(run)}.safetensors"
    save_file(_broken(load_file(file), how), file)
    said = cli("predict", "r", "--data", SOURCE, "--which", "best", "--client", run, code=2).err
    assert f"best/{whose.format(run)}.safetensors' is damaged, or of another run" in said
    assert "--which final" in said


LINES = [[], None, 3, {"round": "x"}, {}, {"bytes_up": None}, {"bytes_down": {}}, {"loss": "x"}, {"personalised": 3}, {"global": "x"},
         {"measured": None}, {"validation": 3}, {"criterion": "x"}]


@pytest.mark.parametrize("line", LINES, ids=str)
def test_records_that_are_json_and_no_records(cli, run, tmp_path, line):
    """Each ended some command in a traceback."""
    file = tmp_path / "r" / "records.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines[-1] = {**lines[-1], **line} if isinstance(line, dict) and line else line
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for command in (("resume", "r"), ("predict", "r", "--data", SOURCE), ("report", "r")):
        assert f"records.jsonl' is damaged in line {len(lines)}." in cli(*command, code=2).err


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"stopped": "x", "summary": {"rounds": null}}',
                                     '{"stopped": 3, "summary": {"rounds": 2}}'])
def test_the_end_of_a_run_that_is_damaged(cli, run, tmp_path, content):
    before = cli("resume", "r", "--json").json()
    (tmp_path / "r" / "done").write_text(content)
    assert "Delete it: the same command then resumes" in cli("resume", "r", code=2).err
    (tmp_path / "r" / "done").unlink()
    after = cli("resume", "r", "--json").json()
    assert after["records"] == before["records"]


@pytest.mark.parametrize("change", [{"data": None}, {"data": "x"}, {"data": {}}, {"config": 3}, {"places": None}])
def test_settings_of_a_run_that_are_json_and_not_ours(cli, run, tmp_path, change):
    """`export`, `measure`, `report` and `compare` ended in tracebacks."""
    file = tmp_path / "r" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    for command in (("export", "r"), ("measure", "r", "accuracy"), ("predict", "r", "--data", SOURCE)):
        cli(*command, code=2)
    if change not in ({"data": {}}, {"places": None}):
        cli("report", "r", code=2)
