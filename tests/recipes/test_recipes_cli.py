"""`consilience recipes` and `consilience reproduce`."""

from __future__ import annotations

import json
import re

import pytest
import typer
from tiny_recipe import TINY
from typer.testing import CliRunner

from consilience.cli.recipes import recipes, reproduce
from consilience.errors import ConfigError, DeviceError
from consilience.recipes.load import recipe_names
from consilience.recipes.results import write_results

app = typer.Typer()
app.command()(recipes)
app.command()(reproduce)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command; errors come through as they do to `main`."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, code: int = 0):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.stdout

    return call


def test_the_list(run):
    facts = {f["name"]: f for f in json.loads(run("recipes", "--json"))}
    assert list(facts) == recipe_names()
    five = facts["dbe/table5"]
    assert {"dbe", "local", "fedfomo"} <= set(five["rows"])
    assert five["data"] == ["ag_news", "cifar100", "fashion_mnist", "tiny_imagenet"]
    assert {"ag_news", "cifar100", "tiny_imagenet"} <= set(five["data_missing"])
    assert five["ready"] <= five["available"] < five["cells"]
    assert five["reasons"] == ["APPLE assumes that all clients join; the paper has no value either"]
    assert facts["dbe/figure2"]["unavailable"].startswith("an illustration")
    text = run("recipes")
    assert "cifar10 (not here)" in text
    assert all(name in text for name in recipe_names())


def test_one_recipe_in_full(run):
    document = json.loads(run("recipes", "lfd/table2", "--json"))
    cell = next(c for c in document["cell_list"] if (c["row"], c["column"]) == ("lfd", "cifar10"))
    assert cell["paper"] == "74.1 ± 0.4"
    assert cell["run"]["momentum"] == 0.9
    assert "global test set" in cell["protocol"]
    assert "lfd_uniform" in run("recipes", "lfd/table2")
    assert "47.10" in run("recipes", "fedbr/table6")                          # as printed: TOML's 47.10 is a number


def test_a_mean_of_columns_lacks_what_they_lack(run):
    lines = [line.split() for line in run("recipes", "fedfa/table4").splitlines() if line.startswith("fedavg ")]
    assert {line[1]: " ".join(line[4:]) for line in lines if "_" not in line[1]} == {
        "office": "needs office_caltech10", "domainnet": "needs domainnet", "prostate": "needs prostate_mri"}
    cells = json.loads(run("recipes", "fedfa/table4", "--json"))["cell_list"]
    assert not [c for c in cells if not c["unavailable"]]


def test_a_reason_stands_once_below_the_table_and_in_full_for_programs(run):
    """What 24 cells lack is a few words in each line; JSON and CSV, which have no notes, say it in full."""
    whole = "the data set cifar10 is not in the data directory (consilience data info cifar10 says how to get it)"
    text = run("recipes", "fedfm/table2")
    table, notes = text.split("\n\n")[1:]
    assert max(map(len, table.splitlines())) < 80
    assert table.count("needs cifar10\n") > 10
    assert notes.count(f"Needs cifar10: {whole}.") == 1
    memory = next(line for line in table.splitlines() if line.startswith("fedavg ") and " cifar10_memory " in line)
    assert memory.endswith("no (1)")
    assert notes.count("No (1): the paper counts the models") == 1
    cells = json.loads(run("recipes", "fedfm/table2", "--json"))["cell_list"]
    assert {c["unavailable"] for c in cells if c["column"] == "cifar10_niid1"} == {whole}
    assert whole in run("recipes", "fedfm/table2", "--format", "csv")
    settings = run("recipes", "fedfa/table9")                                 # the whole of it cannot be had
    assert "no (1)" not in settings
    assert settings.count("a list of settings; nothing is measured") == 1


def test_reproduce_writes_and_prints(run, tiny, tmp_path):
    out = run("reproduce", str(tiny), "--rows", "fedavg,dbe", "--columns", "accuracy", "--seeds", "1", "--rounds-scale", "0.25",
              "--jobs", "1", "--format", "csv")
    lines = out.splitlines()
    assert lines[0].startswith("column,row,paper,ours,difference")
    assert len(lines) == 3
    folder = tmp_path / "reproductions" / "tiny"
    assert {p.name for p in folder.iterdir()} == {"runs", "table.md", "table.csv", "table.tex", "table.json", "result.md", "report.html"}
    document = json.loads(run("reproduce", str(tiny), "--seeds", "1", "--rounds-scale", "0.25", "--report-only", "--json"))
    ours = {(c["row"], c["column"]): c["ours"] for c in document["cells"]}
    assert ours["fedavg", "accuracy"]["mean"] == pytest.approx(float(lines[1].split(",")[3]), abs=0.005)
    assert ours["dbe", "kept"] is None                                    # its measure was not asked for by the first command
    assert document["scaled"] == 0.25


def test_records_are_kept_after_every_run(run, tiny, tmp_path, monkeypatch):
    """A borrowed machine may be gone before the second run ends; the first is in the folder that was asked for by then."""
    class Gone(BaseException):
        pass

    def lost(outcome, *more):
        kept = write_results(outcome, *more)
        raise Gone(kept)
    monkeypatch.setattr("consilience.cli.recipes.write_results", lost)
    with pytest.raises(Gone):
        run("reproduce", str(tiny), "--rows", "fedavg,dbe", "--columns", "accuracy", "--seeds", "1", "--rounds-scale", "0.25",
            "--jobs", "1", "--results", "kept")
    assert len(list((tmp_path / "kept" / "records").glob("fedavg-*.csv"))) == 1
    assert not list((tmp_path / "kept" / "records").glob("dbe-*.csv"))
    assert "FedAvg" in next((tmp_path / "kept").glob("tiny*.md")).read_text(encoding="utf-8")


def test_a_recipe_named_twice_is_written_and_printed_once(run, tiny, tmp_path):
    asked = [f"{tiny}:dbe:kept", f"{tiny}:fedavg:accuracy"]
    lines = run("reproduce", *asked, "--seeds", "1", "--report-only", "--format", "csv", "--out", str(tmp_path / "both")).splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [["accuracy", "FedAvg"], ["what is kept", "FedAvg+DBE"]]
    assert (tmp_path / "both" / "table.csv").is_file()                        # one recipe, so no folder for each
    document = json.loads((tmp_path / "both" / "table.json").read_text(encoding="utf-8"))
    assert f"{asked[0].rpartition('/')[2]} {asked[1].rpartition('/')[2]}" in document["command"]


@pytest.mark.parametrize(("one", "two"), [("tiny.toml", "other/tiny.toml"), ("my own.toml", "my-own.toml")])
def test_recipes_of_one_folder_are_not_written_over_each_other(run, tmp_path, one, two):
    """Names of folders have no spaces, so that two names can mean one."""
    (tmp_path / "other").mkdir()
    both = [tmp_path / one, tmp_path / two]
    for path in both:
        path.write_text(TINY, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"The recipes '{both[0]}' and '{both[1]}' would be written to one folder")):
        run("reproduce", *map(str, both), "--seeds", "1", "--report-only")


def test_failures_end_with_three(run, tiny):
    tiny.write_text(TINY.replace("clients = 4", "clients = 1").replace('method = "fedavg+dbe"', 'method = "fedfomo"')
                    .replace('settings = { "mr.kappa" = 5.0 }', ""), encoding="utf-8")
    run("reproduce", str(tiny), "--rows", "dbe", "--columns", "accuracy", "--seeds", "1", "--rounds-scale", "0.25", "--jobs", "1", code=3)


def test_wrong_words_are_refused_before_anything_runs(run, tiny, tmp_path):
    for arguments, message in ((["--rows", "nobody"], "row of tiny.toml"), (["--columns", "none"], "column of tiny.toml"),
                               (["--format", "pdf"], "table format"), (["--engine", "warp"], "engine")):
        with pytest.raises(ConfigError, match=message):
            run("reproduce", str(tiny), *arguments)
        with pytest.raises(ConfigError, match=message):
            run("reproduce", str(tiny), *arguments, "--report-only")
    assert not (tmp_path / "reproductions").exists()
    with pytest.raises(ConfigError, match="dbe/table5"):
        run("reproduce", "dbe/table55")


def test_what_ended_all_runs_is_said_once(run, tmp_path, monkeypatch, capsys):
    def busy(*given, **more):
        raise DeviceError("The GPU cannot be used now: busy.")
    monkeypatch.setattr("consilience.runs.many.run_config", busy)
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")
    result = CliRunner().invoke(app, ["reproduce", "tiny.toml", "--columns", "accuracy", "--jobs", "1"])
    assert result.exit_code == 3
    assert result.output.count("cannot be used now: busy.") == 2                   # where it happened, and at the end
    assert re.search(r"Warning: .*, seed 0; .*, seed 1; .* and \d more failed: The GPU cannot be used now: busy\.", result.output)
