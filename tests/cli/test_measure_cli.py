"""`consilience measure` on small runs of the digits."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import consilience.runs.measure as runs_measure
from consilience.cli.measure import measure
from consilience.errors import ConfigError, ConsilienceError, DataError
from consilience.metrics.registry import installed_measures
from consilience.metrics.subject import Subject
from consilience.runs import run as train
from consilience.runs.config import RunConfig
from consilience.runs.files import DiskError
from consilience.runs.folder import RunFolder
from consilience.runs.measure import measures_of_round
from consilience.runs.reload import open_run
from consilience.runs.run import build_federation, load_data
from consilience.testing import differences

SETTINGS = {"clients": 4, "rounds": 3, "validation": 0.1, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for method in ("dbe", "local"):
        train(method, "digits", out=root / method, **SETTINGS)
    return root


@pytest.fixture
def call(monkeypatch):
    """Runs the command; errors come through as they do to `main`."""
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(measure)

    def invoke(*arguments: object):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result
    return invoke


def test_named_measures_are_printed_and_kept(call, folders):
    quick = ["--set", "mdl.steps=3", "--set", "mdl.seeds=2", "--set", "mdl.points=3", "--set", "mdl.hidden=8"]
    document = json.loads(call(folders / "dbe", "mdl", "cka", *quick, "--json").stdout)
    assert document["mdl"]["settings"]["steps"] == 3
    assert document["mdl"]["round"] == 3
    assert document["mdl"]["result"]["coded"] < document["mdl"]["result"]["samples"]
    assert document["cka"]["result"]["trace"]["cka"][0] == pytest.approx(1.0)
    kept = json.loads((folders / "dbe" / "measures.json").read_text())
    assert kept == document
    # another one is added; the same again replaces
    text = call(folders / "dbe", "kl").stdout
    assert "global||local" in text
    again = json.loads(call(folders / "dbe", "mdl(steps=2, seeds=1, points=2, hidden=8)", "--json").stdout)
    kept = json.loads((folders / "dbe" / "measures.json").read_text())
    assert sorted(kept) == ["cka", "kl", "mdl"]
    assert kept["mdl"]["settings"] == again["mdl"]["settings"]
    assert kept["mdl"]["settings"]["seeds"] == 1


def test_scores_agree_with_the_run_s_own_record(call, folders):
    opened = open_run(folders / "dbe")
    last = opened.records[-1]
    got = json.loads(call(folders / "dbe", "accuracy", "selection", "harmed", "rounds_to", "communication",
                          "--reference", folders / "local", "--json").stdout)
    for model in ("global", "personalised"):
        mine = got["accuracy"]["result"][model]
        assert mine["pooled"] == pytest.approx(last[model]["accuracy"])
        assert mine["client_mean"] == pytest.approx(last[model]["mean"])
        assert mine["worst_client"] == last[model]["worst_client"]
        assert mine["per_client"] == pytest.approx(last[model]["per_client"])
    alone = open_run(folders / "local").records[-1]["personalised"]["per_client"]
    losing = [n for n, v in last["personalised"]["per_client"].items() if v < alone[n]]
    assert got["harmed"]["result"]["harmed"] == len(losing)
    assert got["harmed"]["result"]["reference"] == {"method": "local", "seed": 0}
    assert got["selection"]["result"]["personalised"]["accuracy"]["last"] == last["personalised"]["accuracy"]
    assert got["selection"]["result"]["personalised"]["accuracy"]["best_by_validation"] is not None
    assert got["communication"]["result"]["up"]["total_bytes"] == sum(r["bytes_up"] for r in opened.records)


def test_without_names_everything_quick_is_measured_and_the_rest_explained(call, folders):
    result = call(folders / "local", "--json")
    document = json.loads(result.stdout)
    assert set(document) == {n for n, cls in installed_measures().items() if cls.quick}
    assert {n for n, e in document.items() if "left_out" in e} == {"dice", "harmed", "rounds_to", "shifted_test"}
    kept = json.loads((folders / "local" / "measures.json").read_text())
    assert "dice" not in kept
    assert kept["auroc"]["result"]["personalised"]["pooled"] > 0.5
    text = call(folders / "local", "--format", "markdown").stdout
    assert "| auroc | personalised pooled |" in text
    assert "harmed: left out, it compares with another run" in text


def test_measuring_does_not_change_the_run(call, folders):
    before = {p: p.read_bytes() for p in (folders / "dbe").rglob("*") if p.is_file() and p.name != "measures.json"}
    call(folders / "dbe", "forgetting", "drift", "local_models")
    after = {p: p.read_bytes() for p in (folders / "dbe").rglob("*") if p.is_file() and p.name != "measures.json"}
    assert before == after


def test_from_python_a_folder_and_one_name_will_do(folders):
    entries = runs_measure.measure(folders / "dbe", "memory")
    assert [*entries] == ["memory"]
    assert entries["memory"]["result"] == runs_measure.measure(open_run(folders / "dbe"), ["memory"])["memory"]["result"]


def test_formats_and_the_list(call, folders):
    latex = call(folders / "dbe", "memory", "--format", "latex")
    assert r"\toprule" in latex.stdout
    assert "1 measures" not in latex.stderr
    assert call(folders / "dbe", "memory", "--format", "csv").stdout.startswith("measure,of what,value")
    assert json.loads(call(folders / "dbe", "memory", "--format", "json").stdout)[0]["name"] == "memory"
    listed = call("--list").stdout
    assert "mdl" in listed
    assert "steps=4000" in listed
    assert {r["name"] for r in json.loads(call("--list", "--json").stdout)} == set(installed_measures())


@pytest.mark.parametrize(("arguments", "words"), [
    (["mld"], "Unknown measure 'mld'. Did you mean 'mdl'?"),
    (["mdl", "--set", "mdl.step=5"], "has no option 'step'. Did you mean 'steps'?"),
    (["mdl", "--set", "mdl.steps=none"], "must be a whole number"),
    (["mdl", "--set", "steps=5"], "--set takes"),
    (["mdl", "--set", "mdl.point=nekc", "--set", "mdl.steps=1"], "Did you mean 'neck'"),
    (["mdl(n=100000)"], "100000 samples were asked for"),
    (["dice"], "'dice' cannot be taken here: it is defined for masks"),
    (["harmed"], "--reference"),
    (["auroc", "auroc(rows=train)"], "'auroc' is asked for twice with different options"),
    (["cka(client='nobody')"], "no client 'nobody'"),
    (["accuracy", "--format", "word"], "table format"),
    (["accuracy(rows='global')"], "there is no global test set. Set rows=test"),
])
def test_errors_say_what_to_do_and_exit_with_two(call, folders, arguments, words):
    with pytest.raises(ConsilienceError) as error:
        call(folders / "dbe", *arguments)
    assert words in str(error.value)
    assert error.value.exit_code == 2


def test_folders_that_hold_no_run(call, folders, tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        call(tmp_path, "accuracy")
    with pytest.raises(ConfigError, match="Name the folder"):
        call()
    with pytest.raises(ConfigError, match="holds no run"):
        call(folders / "dbe", "harmed", "--reference", tmp_path)
    (tmp_path / "config.json").write_text((folders / "dbe" / "config.json").read_text())
    with pytest.raises(DataError, match="no records yet"):
        call(folders / "dbe", "harmed", "--reference", tmp_path)


def test_another_split_is_no_reference(call, folders, tmp_path):
    train("local", "digits", out=tmp_path / "other", **{**SETTINGS, "rounds": 1, "seed": 1})
    with pytest.raises(ConfigError, match="divides its data differently"):
        call(folders / "dbe", "harmed", "--reference", tmp_path / "other")


def test_a_disk_that_refuses_does_not_lose_what_was_measured(call, folders, monkeypatch):
    def refuse(path, value):
        raise DiskError(f"Cannot write {str(path)!r}")
    monkeypatch.setattr(runs_measure, "write_json", refuse)
    result = call(folders / "dbe", "memory", "--json")
    assert json.loads(result.stdout)["memory"]["result"]["by_home"]["personal"] > 0
    assert "Not kept in the folder" in result.stderr


def test_a_run_measured_on_the_way_ends_like_one_that_is_not(folders):
    """Measuring between rounds changes no bit of the run."""
    config = RunConfig.make({**SETTINGS, "method": "dbe"})
    data = load_data(config)
    plain, watched = build_federation(config, data), build_federation(config, data)
    for _ in range(2):
        plain.round()
        watched.round()
        got = measures_of_round(watched, data, ["cka", "forgetting", "silhouette", "drift"])
        assert got["cka"]["last"] < 1
    assert differences(plain, watched) == []
    finished = build_federation(config, data)
    assert RunFolder(folders / "dbe").restore_newest(finished) == 3
    plain.round()
    assert differences(plain, finished) == []
    assert Subject(plain, data).names == tuple(c.name for c in data.clients)


def test_a_run_is_measured_on_one_thread_as_it_is_trained(folders):
    """The round that a measure trains was trained on all cores: its numbers depended on how many there are."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        runs_measure.measure(folders / "dbe", "cka", keep=lambda path, entry: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1]
