"""Comparisons: rows, scores, paired differences, parallel and interrupted runs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from scipy import stats
from typer.testing import CliRunner

import consilience
from consilience.cli import train
from consilience.data import load
from consilience.errors import ConfigError, ConsilienceWarning
from consilience.runs import many
from consilience.runs.compare import Watcher, compare_config
from consilience.runs.comparison import Comparison, chosen_rounds
from consilience.runs.config import RunConfig
from consilience.runs.entries import make_entries

TINY = {"data": "digits", "split": "dirichlet(alpha=0.5)", "clients": 4, "rounds": 2, "steps": 3, "batch": 16, "validation": 0.2,
        "model": "mlp(hidden=(16,))"}
BASE = RunConfig.make(TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("comparison")
    return out, compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=out, jobs=1, save=True)


def test_as_many_runs_at_a_time_as_a_containers_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of two cores on a large machine sees all of the machine's; runs of as many processes would fill its memory."""
    read = Path.read_text
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: "200000 100000" if self.name == "cpu.max" else read(self, *a, **k))
    assert many.default_workers(BASE.replace(device="cpu")) == 2


class Counted:
    """Stands for the function that trains, and counts its calls; `stop_at` is Ctrl-C in that call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> None:
        self.real, self.calls, self.stop_at = many.run_config, 0, stop_at
        monkeypatch.setattr(many, "run_config", self)

    def __call__(self, config: RunConfig, **rest: Any) -> Any:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        return self.real(config, **rest)


def test_from_python_warnings_are_python_s_own(tmp_path):
    with pytest.warns(ConsilienceWarning, match="fedfm, seed 0: anchors first acts in round 21"):
        compare_config(["fedfm"], BASE, [0], out=tmp_path, jobs=1, with_local=False)


# ---- rows ------------------------------------------------------------------------------------------------------------

def names(*methods: str, with_local: bool = True, base: RunConfig = BASE) -> list[str]:
    return [e.name for e in make_entries(methods, base, with_local)[0]]


def test_local_is_a_row_unless_refused() -> None:
    assert names("fedavg") == ["local", "fedavg"]
    assert names("fedavg", "local") == ["local", "fedavg"]
    assert names("fedavg", with_local=False) == ["fedavg"]
    with pytest.raises(ConfigError, match="at least one method"):
        names(with_local=False)


def test_names_that_mean_the_same_share_a_row() -> None:
    entries, notes = make_entries(["scaffold+dbe", "dbe+scaffold", "fedprox", "prox", "fedavg+fedprox", "fedprox"], BASE, False)
    assert [e.name for e in entries] == ["scaffold+dbe", "fedprox"]
    assert notes == ["dbe+scaffold is the same as scaffold+dbe: one row.", "prox is the same as fedprox: one row.",
                     "fedavg+fedprox is the same as fedprox: one row."]


def test_brackets_make_rows_of_their_own_with_folders_of_their_own() -> None:
    entries, notes = make_entries(["fedprox(mu=0.1)", "fedprox(mu=1.0)"], BASE, False)
    assert [e.name for e in entries] == ["fedprox(mu=0.1)", "fedprox(mu=1.0)"]
    assert not notes
    assert len({many.folder_in("out", e.config(BASE, 0)) for e in entries}) == 2


def test_a_setting_reaches_its_methods_only() -> None:
    base = RunConfig(BASE.run, BASE.policy, {"prox.mu": 0.5})
    settings = {e.name: dict(e.settings) for e in make_entries(["fedavg", "fedprox", "fedprox(mu=2.0)"], base)[0]}
    assert settings == {"local": {}, "fedavg": {}, "fedprox": {"prox.mu": 0.5}}        # the last word makes the two one row
    with pytest.raises(ConfigError, match=r"'prox.mu' belongs to none of the methods compared: fedavg"):
        make_entries(["fedavg"], base, False)
    with pytest.raises(ConfigError, match="fedprox"):
        make_entries(["fedproxx"], BASE)


# ---- what the runs say -----------------------------------------------------------------------------------------------

def record(number: int, test: float, validation: float, whole: float) -> dict[str, Any]:
    return {"round": number, "global": {"accuracy": whole, "worst": 0.0}, "personalised": {"accuracy": test, "worst": test / 2},
            "validation": {"accuracy": validation, "loss": 1.0}}


def made(values: dict[str, list[float]], **more: Any) -> Comparison:
    """A comparison of one-round runs with these personalised accuracies, one per seed."""
    seeds = range(len(next(iter(values.values()))))
    documents = {(m, s): {"records": [record(1, v[s], 0.5, v[s])], "data": {"hash": f"data{s}"}} for m, v in values.items() for s in seeds}
    return Comparison(list(values), list(seeds), documents, {}, "fedavg", **more)


def test_every_score_takes_the_rounds_it_says() -> None:
    # test scores by round: 1: .1, 2: .8, 3: .8, 4: .3, 5: .4, 6: .5, 7: .2; validation is best in round 4
    scores = [0.1, 0.8, 0.8, 0.3, 0.4, 0.5, 0.2]
    records = [record(i + 1, s, 0.9 if i == 3 else 0.1, s) for i, s in enumerate(scores)]
    rounds = {score: [r["round"] for r in chosen_rounds(records, score)] for score in
              ("last", "best_by_validation", "best_by_test", "mean_of_best_five")}
    assert rounds == {"last": [7], "best_by_validation": [4], "best_by_test": [2], "mean_of_best_five": [2, 3, 6, 5, 4]}
    whole = lambda score: Comparison(["fedavg"], [0], {("fedavg", 0): {"records": records, "data": {"hash": "x"}}}, {}, "fedavg", score)
    value = {score: whole(score).values("fedavg", "personalised", "accuracy")[0] for score in rounds}
    # (.8 + .8 + .5 + .4 + .3) / 5 = .56
    assert value == pytest.approx({"last": 0.2, "best_by_validation": 0.3, "best_by_test": 0.8, "mean_of_best_five": 0.56})
    assert "best test score, chosen by the test samples themselves" in whole("best_by_test").notes()[0]


def test_gains_are_paired_over_seeds_against_the_reference_and_local() -> None:
    values = {"local": [0.5, 0.6, 0.4], "fedavg": [0.6, 0.8, 0.7], "x": [0.7, 0.9, 0.9]}
    rows = {r["name"]: r for r in made(values).rows()}
    # x − fedavg: .1, .1, .2; mean .4/3.  x − local: .2, .3, .5; mean 1/3.
    assert rows["x"]["gain"]["difference"] == pytest.approx(0.4 / 3)
    assert rows["x"]["gain_over_local"]["difference"] == pytest.approx(1 / 3)
    test = stats.ttest_rel(values["x"], values["local"])
    interval = test.confidence_interval(0.95)
    assert rows["x"]["gain_over_local"]["p_value"] == pytest.approx(test.pvalue)
    assert (rows["x"]["gain_over_local"]["low"], rows["x"]["gain_over_local"]["high"]) == pytest.approx((interval.low, interval.high))
    assert rows["fedavg"]["gain"] is None
    assert rows["local"]["gain_over_local"] is None
    assert rows["local"]["gain"]["difference"] == pytest.approx(-0.2)


@pytest.mark.parametrize(("values", "p"), [({"fedavg": [0.5, 0.7], "x": [0.6, 0.8]}, "–"), ({"fedavg": [0.5], "x": [0.6]}, "–"),
                                           ({"fedavg": [0.5, 0.7], "x": [0.6, 0.9]}, "0.205")])
def test_a_difference_that_cannot_be_tested_has_a_dash_for_p_and_a_note(values: dict[str, list[float]], p: str) -> None:
    table = made(values).table()                                           # differences .1 and .2: t = 3, p = 1 − 2/π·atan 3
    assert table.rows[1][-1] == p
    assert any("leave nothing to measure a difference by" in note for note in table.notes) is (p == "–")


def test_the_best_of_a_column_is_marked_where_letters_can_be_bold() -> None:
    """As printed: 0.7001 and 0.7004 are both best. A row that lacks seeds is on other data, so it is not."""
    comparison = made({"fedavg": [0.7, 0.7002], "x": [0.7004, 0.7004], "y": [0.5, 0.5], "z": [0.9, 0.9]})
    del comparison.documents["z", 1]
    comparison.failures["z", 1] = "why"
    lines = comparison.table().render("latex").splitlines()
    assert r"fedavg & \textbf{0.700 $\pm$ 0.000} & \textbf{0.700 $\pm$ 0.000} & \textbf{0.350" in lines[4]
    assert r"x & \textbf{0.700" in lines[5]
    assert not any("textbf" in line for line in lines[6:8])
    assert any(line.startswith("% Bold:") for line in lines)
    markdown = comparison.table().render("markdown")
    assert markdown.count("**0.700 ± 0.000**") == 4
    assert "\nBold: " in markdown
    assert "**0.700" in comparison.markdown()
    text = comparison.table().render("text")
    assert "**" not in text
    assert "Bold" not in text
    alone = made({"fedavg": [0.7, 0.7]}).table().render("latex")
    assert "textbf" not in alone
    assert "Bold" not in alone


def test_an_error_of_several_lines_stays_a_comment_in_latex() -> None:
    """Its second line was typeset, or ended LaTeX with an alignment tab that is out of place."""
    documents = {("fedavg", 0): {"records": [record(1, 0.5, 0.5, 0.5)], "data": {"hash": "x"}}}
    failed = Comparison(["fedavg", "mine"], [0], documents, {("mine", 0): "RuntimeError: sizes differ:\n3 & 4"}, "fedavg")
    lines = failed.table().render("latex").splitlines()
    assert all(line.startswith("% ") for line in lines[lines.index(r"\end{tabular}") + 1:])
    assert "% 3 & 4" in lines


def test_a_small_p_is_not_printed_as_nought_and_a_minus_is_one_in_latex() -> None:
    table = made({"fedavg": [0.9, 0.8, 0.7], "x": [0.1, 0.0, -0.1 + 1e-6]}).table()
    assert table.rows[1][-1] == "<0.001"
    assert table.render("latex").splitlines()[5].endswith(r"& $-$0.800 [$-$0.800, $-$0.800] & $<$0.001 \\")


def test_one_method_has_nothing_to_gain_from() -> None:
    alone = made({"fedavg": [0.6, 0.8]}).table()
    assert alone.header == ["method", "global", "personalised", "worst client"]
    assert all(len(row) == len(alone.header) for row in alone.rows)
    assert not any("Gain" in note for note in alone.notes)
    two = made({"local": [0.5, 0.6], "fedavg": [0.6, 0.8]}).table()
    assert two.header[4:] == ["gain over fedavg", "p", "gain over local", "p"]
    assert all(len(row) == len(two.header) for row in two.rows)
    assert two.notes[1].startswith("Gain: personalised accuracy minus fedavg's and local's,")


def test_the_reference_is_fedavg_or_what_was_asked_for(finished: tuple[Path, Comparison]) -> None:
    out, comparison = finished
    assert comparison.reference == "fedavg"
    again = compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=out, jobs=1, reference="fedprox")
    assert again.table().header[4] == "gain over fedprox"
    over_local = compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=out, jobs=1, reference="local").table()
    assert over_local.header[4:] == ["gain over local", "p"]                       # not twice
    assert compare_config(["fedprox"], BASE, [0], out=out, jobs=1).reference == "fedprox"
    with pytest.raises(ConfigError, match=r"Unknown reference 'fedpro'\. Did you mean 'fedprox'"):
        compare_config(["fedavg", "fedprox"], BASE, [0], out=out, reference="fedpro")


def test_runs_on_different_data_are_not_compared() -> None:
    good = made({"local": [0.5], "fedavg": [0.6]})
    documents = {**good.documents, ("local", 0): {**good.documents["local", 0], "data": {"hash": "another"}}}
    with pytest.raises(ConfigError, match="seed 0 were made on different data"):
        Comparison(good.methods, good.seeds, documents, {}, "fedavg")


def test_a_score_by_validation_needs_validation_samples() -> None:
    with pytest.raises(ConfigError, match="needs validation samples"):
        compare_config(["fedavg"], RunConfig.make({**TINY, "validation": None}), [0], jobs=1, score="best_by_validation")
    with pytest.raises(ConfigError, match="Unknown score 'lats'"):
        compare_config(["fedavg"], BASE, [0], score="lats")


# ---- running ---------------------------------------------------------------------------------------------------------

def test_the_number_of_processes_changes_nothing(finished: tuple[Path, Comparison], tmp_path: Path) -> None:
    _, alone = finished
    together = compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=tmp_path, jobs=2)
    assert not together.failures
    assert json.dumps(together.document()) == json.dumps(alone.document())


def test_a_finished_comparison_is_only_read(finished: tuple[Path, Comparison], monkeypatch: pytest.MonkeyPatch) -> None:
    out, first = finished
    counted = Counted(monkeypatch)
    assert compare_config(["fedprox", "fedavg"], BASE, [0, 1], out=out, jobs=1).rows()[1] == first.rows()[2]
    assert counted.calls == 0
    more = compare_config(["fedavg"], BASE, [0, 1, 2], out=out, jobs=1)                   # a third seed: two runs more
    assert counted.calls == 2
    assert more.rows()[1]["personalised"]["values"][:2] == first.rows()[1]["personalised"]["values"]


def test_what_was_interrupted_goes_on(finished: tuple[Path, Comparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Counted(patch, stop_at=4)
        with pytest.raises(KeyboardInterrupt):
            compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=tmp_path, jobs=1)
    counted = Counted(monkeypatch)
    assert compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=tmp_path, jobs=1).document() == finished[1].document()
    assert counted.calls == 3                                                       # six runs, three of them were finished


def test_a_failed_run_is_said_in_its_row_and_the_rest_goes_on(tmp_path: Path, finished: tuple[Path, Comparison]) -> None:
    broken = compare_config(["fedavg", "fedprox"], BASE, [0, 1], out=tmp_path, jobs=1, overrides={"fedprox": {"lr": 1e30}})
    rows = {r["name"]: r for r in broken.rows()}
    assert set(rows["fedprox"]["failures"]) == {"0", "1"}
    assert rows["fedprox"]["personalised"] is None
    assert rows["fedavg"] == finished[1].rows()[1]
    assert broken.table().rows[2][0] == "fedprox (0 of 2 seeds)"
    assert any(note.startswith("fedprox, seeds 0, 1 failed: ") for note in broken.table().notes)


@pytest.mark.parametrize(("weights", "said"), [
    ({"fedavg": "samples", "scaffold": "uniform", "feddyn": "uniform"}, ["scaffold, feddyn, by its samples in fedavg"]),
    ({"fedavg": "samples", "fedprox": "samples"}, []),
    ({"scaffold": "uniform", "feddyn": "uniform"}, []),
    ({"local": "samples", "local+sam": "samples", "union": "samples", "scaffold": "uniform"}, []),      # nothing is averaged
    ({"fedfomo": "samples", "apple": "samples", "groupdro": "uniform", "fedavg": "samples"}, []),       # weights of their own
    ({"gone.py:Gone": "samples", "scaffold": "uniform"}, []),                                           # who knows
    ({"gone.py:Gone": "uniform", "scaffold": "uniform", "fedavg": "samples"}, ["scaffold, by its samples in fedavg"]),
])
def test_who_weighs_clients_otherwise_is_said(weights: dict[str, str], said: list[str]) -> None:
    documents = {(m, 0): {"config": {"method": m, "weights": w}, "data": {"hash": "a"}, "records": []} for m, w in weights.items()}
    notes = Comparison(list(weights), [0], documents, {}, next(iter(weights))).notes()
    assert [n.partition(";")[0] for n in notes if n.startswith("Averages")] == [
        f"Averages: every client weighs the same in {names}" for names in said]


def test_seeds_that_failed_in_the_same_way_share_a_line() -> None:
    failures = {("fedavg", 0): "no room", ("fedavg", 1): "no room", ("fedprox", 0): "no room", ("fedprox", 1): "no luck"}
    assert Comparison(["fedavg", "fedprox"], [0, 1], {}, failures, "fedavg").failed() == [
        "fedavg, seeds 0, 1 failed: no room", "fedprox, seed 0 failed: no room", "fedprox, seed 1 failed: no luck"]


def test_what_no_run_can_do_is_said_once(tmp_path: Path) -> None:
    """A split that the data cannot give is no fault of a method: one error, no table of dashes."""
    with pytest.raises(ConfigError, match=r"^No run could be made: Split 'dirichlet' over 400 clients .* needs 4000 samples"):
        compare_config(["fedavg", "fedprox"], BASE.replace(clients=400), [0, 1], out=tmp_path, jobs=1)


def test_what_no_run_can_do_is_said_once_though_seeds_have_other_numbers(tmp_path: Path) -> None:
    """The largest client of a seed's split is in the message."""
    with pytest.raises(ConfigError, match=r"^No run could be made: Every client has fewer samples than .*: the largest has \d+\."):
        compare_config(["fedavg", "fedprox"], BASE.replace(batch=5000, last_batch="drop"), [0, 1], out=tmp_path, jobs=1)


@pytest.mark.slow
def test_a_process_that_dies_takes_no_other_run_along(tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text(
        "import os\nfrom dataclasses import dataclass\nfrom consilience.core.part import Part\n\n\n"
        "@dataclass(frozen=True)\nclass Die(Part):\n"
        "    name = 'die'\n\n    def build(self, module, spec):\n        os._exit(9)\n")
    method = f"{tmp_path}/die.py:Die"
    broken = compare_config(["fedavg", method], BASE, [0, 1], out=tmp_path / "out", jobs=2)
    assert {key[0] for key in broken.failures} == {method}
    assert all("process died" in why for why in broken.failures.values())
    assert None not in broken.values("fedavg", "personalised", "accuracy")


def test_progress_counts_rounds_of_all_runs(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Ear(Watcher):
        def begin(self, what: str, runs: int, rounds: int) -> None:
            heard.append((what, runs, rounds))

        def rounds_done(self, rounds: int) -> None:
            heard.append(rounds)

        def run_done(self, label: str, failure: str | None) -> None:
            heard.append(label)

    compare_config(["fedavg"], BASE, [5], out=tmp_path, jobs=1, with_local=False, watcher=Ear())
    assert heard == [("comparing", 1, 2), 1, 2, "fedavg, seed 5"]


# ---- saving and the command line -------------------------------------------------------------------------------------

def test_the_comparison_is_saved(finished: tuple[Path, Comparison]) -> None:
    out, comparison = finished
    assert json.loads((out / "comparison.json").read_text()) == json.loads(json.dumps(comparison.document(), default=list))
    text = (out / "comparison.md").read_text()
    assert text.startswith("| method | global |")
    assert "| fedprox |" in text
    assert all((out / folder / "done").is_file() for row in comparison.rows() for folder in row["folders"].values())


def test_the_command_takes_a_file_with_settings_of_single_methods(tmp_path: Path) -> None:
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({**TINY, "rounds": 1, "settings": {"prox": {"mu": 0.5}}}))
    app = typer.Typer()
    app.command()(train.compare)
    call = ["fedavg", "fedprox", "--config", str(config), "--seeds", "1", "--out", str(tmp_path / "out"), "--jobs", "1", "--no-local"]
    result = CliRunner().invoke(app, [*call, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["config"]["settings"] == {"prox.mu": 0.5}
    assert [r["name"] for r in document["rows"]] == ["fedavg", "fedprox"]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == document
    latex = CliRunner().invoke(app, [*call, "--format", "latex"])
    assert r"\toprule" in latex.stdout
    both = json.loads(CliRunner().invoke(app, [*call, "--format", "json", "--per-client"]).stdout)
    assert [row["client"] for row in both["clients"]] == [f"client{i}" for i in range(4)]
    assert both["rows"] == document["rows"]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == document | {"clients": both["clients"]}
    assert "| client3 |" in (tmp_path / "out" / "comparison.md").read_text()
    every = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*call, "--format", "csv", "--per-client"]).stdout)))
    assert [(row["method"], row["client"]) for row in every] == [
        ("fedavg", ""), ("fedprox", ""), *((m, f"client{i}") for m in ("fedavg", "fedprox") for i in range(4))]
    assert [float(row["personalised"]) for row in every[2:]] == [row[m]["mean"] for m in ("fedavg", "fedprox") for row in both["clients"]]
    alone = list(csv.DictReader(io.StringIO(CliRunner().invoke(app, [*call, "--format", "csv"]).stdout)))
    assert [{k: v for k, v in row.items() if k != "client"} for row in every[:2]] == alone
    assert {row["global"] for row in every[2:]} == {""}


# ---- from a script ---------------------------------------------------------------------------------------------------

SCRIPT = f"""
import consilience

print("once")
comparison = consilience.compare(["fedavg"], seeds=[0], out="folder", jobs=2, **{TINY!r})
print(comparison.table().render("csv"), comparison.failures)
"""


def test_settings_by_name_give_the_comparison_of_their_configuration(finished, tmp_path: Path) -> None:
    """As `consilience.run` takes them: methods' settings go to the methods that have them, seeds count from the first."""
    out, wanted = finished
    shutil.copytree(out, tmp_path / "runs")
    made = consilience.compare(["fedavg", "fedprox"], seeds=2, out=tmp_path / "runs", jobs=1, **TINY)
    assert made.document() == wanted.document()
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == sorted(p.name for p in out.iterdir())       # nothing was run again
    other = consilience.compare("fedprox", seeds=1, seed=1, jobs=1, with_local=False, settings={"prox.mu": 0.5}, **TINY)
    assert (other.methods, list(other.seeds), other.config["settings"]) == (["fedprox"], [1], {"prox.mu": 0.5})
    assert other.documents["fedprox", 1]["config"]["settings"] == {"prox.mu": 0.5}


def test_a_comparison_shows_its_table_and_not_its_records(finished) -> None:
    _, comparison = finished
    assert repr(comparison) == "<Comparison: local, fedavg, fedprox; 2 seeds. Its table: print(comparison)>"
    assert str(comparison) == comparison.table().plain()
    assert comparison._repr_markdown_() == comparison.table().render("markdown")


def test_a_comparison_shows_its_progress_where_it_is_asked_to(capfd, tmp_path: Path) -> None:
    for asked in (False, True):
        consilience.compare(["fedavg"], seeds=1, jobs=1, with_local=False, progress=asked, **TINY)
        assert ("1 of 1 runs" in capfd.readouterr().err) is asked


def test_csv_has_a_number_a_cell(finished) -> None:
    """For data frames and spreadsheets: no ± and no brackets, and nothing where there is no number."""
    _, comparison = finished
    local, fedavg, fedprox = csv.DictReader(io.StringIO(comparison.table().render("csv")))
    row = comparison.rows()[2]
    assert (fedprox["method"], fedprox["seeds"]) == ("fedprox", "2")
    assert (float(fedprox["personalised"]), float(fedprox["personalised std"])) == (row["personalised"]["mean"], row["personalised"]["std"])
    assert float(fedprox["worst client"]) == row["worst"]["mean"]
    assert [fedprox[f"gain over fedavg{what}"] for what in ("", " low", " high", " p")] == [
        "" if row["gain"][k] is None else str(row["gain"][k]) for k in ("difference", "low", "high", "p_value")]
    assert local["global"] == fedavg["gain over fedavg"] == ""
    for line in (local, fedavg, fedprox):
        assert all(not value or math.isfinite(float(value)) for name, value in line.items() if name != "method")
    (first, *_) = csv.DictReader(io.StringIO(consilience.compare("fedavg", seeds=1, jobs=1, **TINY).client_table().render("csv")))
    assert list(first) == ["client", "local", "local std", "fedavg", "fedavg std"]


def test_data_in_memory_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"np\.savez"):
        consilience.compare(["fedavg"], load("digits", clients=4))             # type: ignore[arg-type]


def test_a_method_beside_the_methods_is_refused() -> None:
    """It was left out without a word."""
    with pytest.raises(ConfigError, match="add 'dbe' to them"):
        consilience.compare(["fedavg"], method="dbe", seeds=1, jobs=1, **TINY)


@pytest.mark.parametrize("from_file", [True, False])
def test_a_script_that_does_not_ask_for_its_name_compares_in_processes(tmp_path: Path, from_file: bool) -> None:
    """Spawned processes would run it again from its first line, and die of it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, *(["script.py"] if from_file else [])], input=None if from_file else SCRIPT, cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert done.stdout.count("once") == 1
    assert "of 1 seeds" not in done.stdout
    assert "fedavg," in done.stdout
    assert len(list((tmp_path / "folder").glob("*/done"))) == 2             # local and fedavg


def test_the_table_names_a_row_that_ended_before_its_method_acted() -> None:
    """Patience ended the run of 40 rounds after the first; FedFM begins in the 21st."""
    comparison = made({"fedavg": [0.5], "fedfm": [0.5]})
    doc = comparison.documents["fedfm", 0]
    for rounds, said in ((1, "Raise rounds"), (40, "Raise patience")):
        doc["config"] = {"method": "fedfm", "rounds": rounds}
        (note,) = [n for n in comparison.notes() if "changes nothing" in n]
        assert note.startswith("fedfm: anchors first acts in round 21, and the run has 1: it changes nothing here. " + said)
    doc["records"][0]["round"] = 21
    assert not [n for n in comparison.notes() if "changes nothing" in n]


def test_the_table_names_a_row_whose_method_never_acted(tmp_path: Path) -> None:
    """FedFM begins in round 21; in two rounds its row is FedAvg's. A finished comparison that is only read again must say so too."""
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConsilienceWarning)
            comparison = consilience.compare(["fedavg", "fedfm", "fedfm(start=1)"], "digits", clients=4, rounds=2, steps=2, seeds=1,
                                             with_local=False, out=tmp_path)
        said = [n for n in comparison.notes() if "changes nothing" in n]
        assert [n.partition(":")[0] for n in said] == ["fedfm"]
        assert "anchors first acts in round 21, and the run has 2" in said[0]
        assert said[0] in (tmp_path / "comparison.md").read_text()
