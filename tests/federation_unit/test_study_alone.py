"""What a study runs and what it says, from made-up outcomes."""

from __future__ import annotations

import contextlib

import pytest
from typer.testing import CliRunner

from consilience.cli import app
from consilience.errors import ConfigError, ConsilienceError
from consilience.federation import app as app_module
from consilience.federation import launch, study
from consilience.federation.app import settle
from consilience.federation.demo import Demo
from consilience.federation.study import Outcome, best_of, inline, make_plan, read_outcome
from consilience.federation.study_report import Report
from consilience.parts.stack import parse_stack
from consilience.runs.entries import make_entries
from consilience.runs.files import DiskError


@pytest.fixture(scope="module")
def settings():
    return settle({"method": "fedavg", "rounds": 3}, like="digits")


def test_every_method_has_the_same_budget_and_local_and_fedavg_are_there(settings):
    plan = make_plan(settings, ["fedprox", "fedavg+dbe"], budget=2)
    assert [e.name for e in plan.entries] == ["local", "fedavg", "fedprox", "fedavg+dbe"]
    assert [t.method for t in plan.trials] == ["local"] * 2 + ["fedavg"] * 2 + ["fedprox"] * 2 + ["fedavg+dbe"] * 2
    assert all(t.overrides["rounds"] == t.overrides["eval_every"] == 3 for t in plan.trials)
    assert len({t.folder for t in plan.trials}) == 8
    again = make_plan(settings, ["fedprox", "fedavg+dbe"], budget=2)
    assert [t.folder for t in again.trials] == [t.folder for t in plan.trials]         # found again after an interruption


def test_overrides_carry_the_options_in_the_methods_name(settings):
    plan = make_plan(settings, ["lfd", "fedavg+dbe(kappa=3)"], budget=3)
    for trial in plan.trials:
        parts = {p.name: p for p in parse_stack(trial.overrides["method"]).parts}
        for path, value in trial.point.items():
            if path == "lfd.tau":                        # one option that sets two parts' together
                assert parts["cosine"].tau == parts["drift"].tau == value
            elif path != "lr":
                part, _, name = path.partition(".")
                assert getattr(parts[part], name) == value
        if "dbe" in trial.method:
            assert parts["mr"].kappa == 3                # what was given with the candidate is not searched


def test_a_method_in_one_line_is_the_same_method(settings):
    for name in ("fedavg", "scaffold+dbe", "lfd(tau=0.05)", "fedfa", "fedfm", "moon(mu=2)"):
        entry = make_entries([name], settings.run, with_local=False)[0][0]
        assert parse_stack(inline(entry)).parts == parse_stack(entry.method, entry.settings).parts


@pytest.mark.parametrize(("candidates", "more", "said"), [(["scafold"], {}, "'scaffold'"), (["fedbr"], {}, "allow_raw_averages"),
                                                         (["union"], {}, "no data"), (["fedavg+dbe"], {"budget": 0}, "at least 1")])
def test_refusals_come_before_any_run(settings, candidates, more, said):
    with pytest.raises(ConsilienceError, match=said):
        make_plan(settings, candidates, **more)


def test_what_a_run_warns_of_is_among_the_plans_remarks(settings):
    plan = make_plan(settings, ["fedprox", "fedavg+dp"], budget=2)
    assert [line.partition(" 47 times")[0] for line in plan.remarks] == ["fedavg+dp: dp adds noise"]       # √19,722 / 3, once for both


def test_an_app_with_a_methods_options(settings):
    fixed = settle({"method": "dbe", "settings.dbe.kappa": 5}, like="digits")
    with pytest.raises(ConfigError, match=r"dbe\.kappa"):
        make_plan(fixed, ["fedprox"])


def outcomes(plan):
    """Validation prefers the second configuration of every method; test accuracies are chosen by hand."""
    tests = {"site-0": 100, "site-1": 50}
    by_hand = {"local": (0.8, 0.6), "fedavg": (0.7, 0.7), "fedprox": (0.9, 0.5)}
    out = []
    for t in plan.trials:
        first, second = by_hand[t.method]
        better = t.number == 1
        out.append(Outcome(t, 0.75 + 0.1 * better + 0.01 * (t.method == "fedprox"), 1.0, {"site-0": first if better else 0.99,
                                                                                         "site-1": second if better else 0.99}, tests))
    return out


def test_gains_per_site(settings):
    plan = make_plan(settings, ["fedprox"], budget=2)
    report = Report(plan, outcomes(plan))
    assert all(report.best(m).trial.number == 1 for m in report.methods)      # although the first tests better
    assert report.recommended() == "fedprox"
    rows = {(r["site"], r["method"]): r for r in report.per_site()}
    row = rows["site-0", "fedprox"]
    assert row["gain_over_local"] == pytest.approx(0.1)
    assert row["gain_over_fedavg"] == pytest.approx(0.2)
    # 1.96 · √((0.9·0.1 + 0.8·0.2) / 100) = 1.96 · √0.0025 = 0.098
    assert row["gain_over_local_half_width"] == pytest.approx(0.098)
    assert rows["site-1", "fedprox"]["gain_over_local"] == pytest.approx(-0.1)
    summary = {r["method"]: r for r in report.summary()}
    assert summary["fedprox"]["sites_above_local"] == 1
    assert summary["fedprox"]["lowest_gain_over_local"] == pytest.approx(-0.1)
    assert summary["fedprox"]["accuracy"] == pytest.approx((0.9 * 100 + 0.5 * 50) / 150)
    assert summary["local"]["sites_above_local"] is None
    for form in ("text", "markdown", "latex", "csv", "json"):
        assert all("fedprox" in t.render(form) for t in report.tables())


def test_a_study_goes_by_the_app_s_criterion():
    settings = settle({"method": "fedavg", "rounds": 3, "criterion": "auroc"}, like="digits")
    plan = make_plan(settings, ["fedprox"], budget=2)
    scores = lambda accuracy, value: {"per_client": {"site-0": accuracy}, "value": value, "worst": value}
    record = {"validation": {"accuracy": 0.9, "loss": 0.1}, "global": scores(0.9, 0.9), "personalised": scores(0.9, 0.9),
              "criterion": {"measure": "auroc", "global": scores(0.6, 0.6), "personalised": scores(0.6, 0.6), "validation": 0.7}}
    outcome = read_outcome(plan.trials[0], {"records": [record], "sizes": {"site-0": {"test": 10}}})
    assert (outcome.validation, outcome.accuracy) == (0.7, {"site-0": 0.6})
    bare = record | {"criterion": record["criterion"] | {"personalised": scores(0.6, 0.6) | {"per_client": {}}}}
    assert read_outcome(plan.trials[0], {"records": [bare], "sizes": {}}).failure.startswith("no site's test samples give auroc")
    report = Report(plan, outcomes(plan))
    assert report.gain("fedprox", "local", "site-0") == (pytest.approx(0.1), None)            # no interval: it is no mean over rows
    summary, each = report.tables()
    assert ("auroc" in summary.header, "auroc" in each.header, "by auroc on all sites" in summary.notes[0]) == (True, True, True)


def test_ties_failures_and_missing_validation(settings):
    plan = make_plan(settings, ["fedprox"], budget=2)
    mine = [t for t in plan.trials if t.method == "fedprox"]
    tied = [Outcome(mine[0], 0.5, 1.0, {"a": 1.0}), Outcome(mine[1], 0.5, 0.9, {"a": 0.0})]
    assert best_of(tied, "fedprox") is tied[1]                                   # lower validation loss
    broken = [Outcome(mine[0], failure="too few answered"), Outcome(mine[1], failure="too few answered")]
    assert best_of(broken, "fedprox") is None
    report = Report(plan, [o for o in outcomes(plan) if o.trial.method != "fedprox"] + broken)
    assert "too few answered" in report.tables()[0].render("text")
    assert report.recommended() in ("local", "fedavg")
    unjudged = [Outcome(mine[0], None, None, {"a": 1.0}), Outcome(mine[1], None, None, {"a": 0.5})]
    assert best_of(unjudged, "fedprox") is unjudged[0]


@pytest.mark.parametrize(("more", "failing", "code"), [((), False, 0), ((), True, 3), (("--json",), True, 3)])
def test_the_exit_code_says_whether_runs_failed(settings, tmp_path, monkeypatch, more, failing, code):
    """`flwr run`, which makes them, exits with 0 in any case."""
    def made(plan, *rest):
        good = outcomes(plan)
        return [*good[:-1], Outcome(good[-1].trial, failure="too few answered")] if failing else good
    monkeypatch.setattr(study, "run_study", made)
    monkeypatch.setattr(app_module, "read_settings", lambda app: settings)
    monkeypatch.setattr(launch, "connect", lambda folder: (contextlib.nullcontext(), None))
    command = ["federation", "study", "app", "--server", "server", "--candidate", "fedprox", "--tune", "2", "--out", str(tmp_path), *more]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == code, said.output
    assert ("too few answered" in said.stdout) is failing
    assert (tmp_path / "study.json").is_file()


def test_a_study_that_cannot_be_written_is_shown_and_not_said_to_be_there(settings, tmp_path, monkeypatch):
    (tmp_path / "study.json").mkdir()
    monkeypatch.setattr(study, "run_study", lambda plan, *rest: outcomes(plan))
    monkeypatch.setattr(app_module, "read_settings", lambda app: settings)
    monkeypatch.setattr(launch, "connect", lambda folder: (contextlib.nullcontext(), None))
    command = ["federation", "study", "app", "--server", "server", "--candidate", "fedprox", "--tune", "2", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, command)
    assert isinstance(said.exception, DiskError)
    assert "fedprox" in said.stdout
    assert "study.md" not in said.stdout


@pytest.mark.parametrize(("privacy", "said"), [({}, 0), ({"privacy": {"epsilon": None}}, 0), ({"privacy": {"epsilon": 4.4}}, 1)])
def test_a_demo_says_where_noise_makes_the_difference(privacy, said):
    """A simulation's noise is of the seed, so that it repeats; a site's is nobody else's."""
    record = {"round": 1, "personalised": {"per_client": {}}, **privacy}
    notes = Demo("dp", [], [record], [record], 2.1).table().notes
    assert sum("noise" in note for note in notes) == said
