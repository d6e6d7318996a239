"""`consilience report` on real, short runs."""

from __future__ import annotations

import json
import shlex

import pytest
import typer
from typer.testing import CliRunner

import consilience
from consilience.cli import train
from consilience.cli.report import report
from consilience.errors import ConfigError
from consilience.report.gather import gather
from consilience.report.reproduce import command_of
from consilience.runs.reload import read_run_config

app = typer.Typer()
app.command()(report)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    top = tmp_path_factory.mktemp("real")
    for method in ("local", "fedavg", "fedavg+dbe"):
        consilience.run(method, "digits", clients=3, split="dirichlet(alpha=0.5)", rounds=2, momentum=0.5, out=top / "runs" / method,
                        settings={"dbe.kappa": 5} if "dbe" in method else {})
    return top / "runs"


def call(*arguments: str):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_report_with_feature_maps_leaves_the_runs_as_they_were(runs, tmp_path):
    before = {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()}
    out = call(runs, "-o", tmp_path / "r.html", "--features", "--samples", "60", "--json")
    assert {p: p.read_bytes() for p in runs.rglob("*") if p.is_file()} == before
    facts = json.loads(out.stdout)
    assert facts["runs"] == 3
    assert facts["bytes"] == (tmp_path / "r.html").stat().st_size
    text = (tmp_path / "r.html").read_text()
    data = json.loads(text.split('id="report-data">')[1].split("</script>")[0])
    assert [len(m["points"]["before"]) for m in data["maps"]] == [60, 60, 60]
    assert all(m["points"]["before"] != m["points"]["after"] for m in data["maps"])
    assert len(data["splits"]) == 1
    assert {m["clients"][0] for m in data["maps"]} == {"client0"}


def test_plain_output_and_title(runs, tmp_path):
    out = call(runs / "fedavg", "-o", tmp_path / "one.html", "--title", "A <title>")
    assert "1 run of fedavg" in out.stdout
    assert "<h1>A &lt;title&gt;</h1>" in (tmp_path / "one.html").read_text()


def test_errors_name_what_is_wrong(runs, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        call(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="reference"):
        call(runs, "-o", tmp_path / "r.html", "--reference", "fedavgg")


def test_commands_ask_for_the_same_run(runs, monkeypatch):
    """What the page says to type gives the configuration of the run, by the command line's own reading."""
    asked = []

    class Stop(Exception):
        pass

    def catch(config, **how):
        asked.append(config)
        raise Stop

    monkeypatch.setattr(train, "run_config", catch)
    command = typer.Typer()
    command.command()(train.run)
    for run in gather([runs]).runs:
        words = shlex.split(command_of(run))
        assert words[:2] == ["consilience", "run"]
        result = CliRunner().invoke(command, words[2:])
        assert isinstance(result.exception, Stop), result.output
        assert asked[-1].digest() == read_run_config(run.path)[0].digest()
