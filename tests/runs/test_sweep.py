"""Sweeps: what they go over, exact resume, the validation score as the only objective."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from consilience.errors import ConfigError
from consilience.runs import sweep as module
from consilience.runs.axes import parse_axis
from consilience.runs.config import RunConfig
from consilience.runs.entries import Entry
from consilience.runs.listener import Watcher
from consilience.runs.sweep import JOURNAL, Sweep, sweep

TINY = {"data": "digits", "split": "dirichlet(alpha=0.5)", "clients": 4, "rounds": 2, "steps": 3, "batch": 16, "validation": 0.2,
        "model": "mlp(hidden=(16,))", "method": "fedprox"}
BASE = RunConfig.make(TINY)
OVER = ["prox.mu=0.001,0.01,0.1", "lr=0.01:0.5:log"]
ENTRY = Entry("fedprox", "fedprox")


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="Optuna is not installed; it comes with the extra consilience[sweep]")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    pytest.importorskip("optuna", reason="Optuna is not installed; it comes with the extra consilience[sweep]")
    return sweep("fedprox", BASE, OVER, 4, out=tmp_path_factory.mktemp("sweep"))


# ---- what is swept ---------------------------------------------------------------------------------------------------

def test_lists_and_ranges_are_read() -> None:
    axis = lambda text: parse_axis(text, ENTRY, BASE)
    assert axis("prox.mu=0.001,0.01,1e-1").values == (0.001, 0.01, 0.1)
    assert axis("fedprox.mu=1,2").targets == ("prox.mu",)
    assert axis("schedule=constant,step(every=2, gamma=0.5)").values == ("constant", "step(every=2, gamma=0.5)")
    lr = axis("lr=0.01:0.1:log")
    assert (lr.low, lr.high, lr.log, lr.step, lr.whole) == (0.01, 0.1, True, None, False)
    momentum, steps = axis("momentum=0:0.9:0.3"), axis("steps=1:5")
    assert (momentum.step, momentum.whole) == (0.3, False)
    assert (steps.low, steps.high, steps.whole) == (1, 5, True)


@pytest.mark.parametrize(("text", "message"), [
    ("lr", "name=value,value"), ("lr=", "name=value,value"), ("lr=0.1", "two or more different values"),
    ("lr=0.1,0.1", "two or more different values"), ("lr=0.5:0.1", "low end below"), ("lr=0:1:log", "low end above 0"),
    ("lr=0.1:0.2:often", "name=low:high:step"), ("lr=-1:1", "'lr' option of the run must be above 0"), ("steps=1:2.5", "whole numbers"),
    ("prox.nu=1,2", "prox has no option 'nu'. Did you mean 'mu'"), ("dbe.kappa=1,2", "'dbe' in 'dbe.kappa' is not in the method"),
    ("seed=1,2", "changes what is measured"), ("validation=0.1,0.2", "changes what is measured"), ("lrr=1,2", "no setting of a run. Did"),
    ("train_fraction=0.5,1", "changes what is measured"), ("hold_out=client0,client1", "changes what is measured"),
    ("eval_clients=1:4", "changes what is measured"), ("store=memory,disk", "does not change a run's scores"),
    ("engine=sequential,workers", "does not change a run's scores"),
    ("criterion=f1,auroc", "changes what is measured"),
])
def test_what_cannot_be_swept_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_axis(text, ENTRY, BASE)
    assert message in str(error.value)


def test_a_known_setting_that_cannot_be_swept_is_not_taken_for_a_slip() -> None:
    with pytest.raises(ConfigError) as error:
        parse_axis("split=iid,dirichlet(alpha=1)", ENTRY, BASE)
    assert "Did you mean" not in str(error.value)
    assert "`consilience compare`" in str(error.value)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'consilience\[sweep\]'"):
        sweep("fedprox", BASE, OVER, 1)


# ---- trials ----------------------------------------------------------------------------------------------------------

def test_trials_lie_in_their_ranges_and_the_best_has_the_highest_validation_score(undisturbed: Sweep) -> None:
    assert [t["trial"] for t in undisturbed.trials] == [0, 1, 2, 3]
    for trial in undisturbed.trials:
        assert trial["settings"]["prox.mu"] in (0.001, 0.01, 0.1)
        assert 0.01 <= trial["settings"]["lr"] <= 0.5
        records = [json.loads(line) for line in (undisturbed.folder / trial["folder"] / "records.jsonl").read_text().splitlines()]
        assert trial["validation"] == records[-1]["validation"]["accuracy"]
    best = undisturbed.best()
    assert best is not None
    assert best["validation"] == max(t["validation"] for t in undisturbed.trials)
    assert len({t["settings"]["lr"] for t in undisturbed.trials}) == 4              # a fresh draw for every number


def test_the_journal_is_json_and_pickling_samplers_are_refused(undisturbed: Sweep) -> None:
    lines = (undisturbed.folder / JOURNAL).read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    with pytest.raises(ConfigError, match="Unknown sampler 'cmaes'"):
        sweep("fedprox", BASE, OVER, 1, sampler="cmaes")


def test_a_finished_sweep_runs_nothing(undisturbed: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_config", lambda *_, **__: pytest.fail("a run was made"))
    assert sweep("fedprox", BASE, OVER, 4, out=undisturbed.folder).document() == undisturbed.document()


def test_an_interrupted_sweep_goes_on_to_the_same_trials(undisturbed: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = module.run_config, []

    def stopping(config: RunConfig, **rest: Any) -> Any:
        calls.append(config)
        if len(calls) == 3:
            raise KeyboardInterrupt                                                 # trial 2 is drawn, but never told
        return real(config, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "run_config", stopping)
        with pytest.raises(KeyboardInterrupt):
            sweep("fedprox", BASE, OVER, 3, out=tmp_path)
    with open(tmp_path / JOURNAL, "a") as journal:
        journal.write('{"op_code": 5, "half a li')                                  # power failed while a line was written
    resumed = sweep("fedprox", BASE, OVER, 4, out=tmp_path)                         # and one trial more than asked for at first
    assert resumed.trials == undisturbed.trials


@pytest.mark.parametrize(("over", "every"), [
    (["prox.mu=0.01,0.1,1"], [(0.01,), (0.1,), (1,)]), (["steps=1:2", "momentum=0:0.5:0.25"],
                                                      [(k, m) for k in (1, 2) for m in (0.0, 0.25, 0.5)])], ids=["list", "ranges"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_configuration_is_tried_twice(optuna: Any, tmp_path: Path, over: list[str], every: list[Any], sampler: str,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """However many trials are asked for, and interrupted or not."""
    monkeypatch.setattr(module, "run_config", lambda config, **_: SimpleNamespace(
        records=[{"round": 1, "validation": {"accuracy": config.policy.momentum, "loss": 1.0}}]))
    few = sweep("fedprox", BASE, over, 2, out=tmp_path, sampler=sampler)
    found = sweep("fedprox", BASE, over, 30, out=tmp_path, sampler=sampler)
    assert sorted(tuple(t["settings"].values()) for t in found.trials) == every
    assert (found.trials[:2], few.remarks) == (few.trials, [])
    assert found.remarks == [f"All {len(every)} configurations of the settings swept were tried; 30 trials were asked for."]
    assert found.remarks[0] in found.table().plain()
    assert sweep("fedprox", BASE, over, 30, out=tmp_path, sampler=sampler).trials == found.trials


def test_no_test_score_is_read(undisturbed: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.run_config

    class Poison:
        def _refuse(self, *_: Any) -> Any:
            raise AssertionError("a test score was read")
        __bool__ = __getitem__ = get = _refuse

    def poisoned(config: RunConfig, **rest: Any) -> Any:
        records = [{**r, "global": Poison(), "personalised": Poison()} for r in real(config, **rest).records]
        return SimpleNamespace(records=records, summary=Poison())

    monkeypatch.setattr(module, "run_config", poisoned)
    assert sweep("fedprox", BASE, OVER, 2, out=tmp_path).trials == undisturbed.trials[:2]


def test_hopeless_trials_are_pruned_and_failed_ones_are_kept_with_their_reason(
        optuna: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = {"rounds": 0, "run": 0}

    def fake(config: RunConfig, *, out: Path, listener: Any) -> Any:
        """Runs 0–4 score 0.9 in every round, run 5 scores 0.1: below the median from round 2 of 8 on. Run 6 fails."""
        run = heard["run"]
        heard["run"] += 1
        if run == 6:
            raise ConfigError("no such thing")
        records = []
        listener.started(None, 8, 0)
        for number in range(1, 9):
            records.append({"round": number, "validation": {"accuracy": 0.1 if run == 5 else 0.9, "loss": 1.0}})
            heard["rounds"] += 1
            listener.round_done(records[-1])
        return SimpleNamespace(records=records)

    monkeypatch.setattr(module, "run_config", fake)
    found = sweep("fedprox", BASE.replace(rounds=8), OVER, 7, out=tmp_path, prune=True)
    assert [t["state"] for t in found.trials] == ["complete"] * 5 + ["pruned", "failed"]
    assert heard["rounds"] == 5 * 8 + 2                     # the warm-up is a quarter of the rounds: the verdict falls in round 2
    assert found.trials[6]["failure"] == "no such thing"
    assert "Trial 6 failed: no such thing" in found.table().notes


def test_another_plan_does_not_enter_the_folder(undisturbed: Sweep, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a sweep with over"):
        sweep("fedprox", BASE, OVER[:1], 4, out=undisturbed.folder)
    with pytest.raises(ConfigError, match="holds a sweep with rounds = 2, not 3"):
        sweep("fedprox", BASE.replace(rounds=3), OVER, 4, out=undisturbed.folder)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match="but no sweep"):
        sweep("fedprox", BASE, OVER, 1, out=tmp_path)
    with pytest.raises(ConfigError, match=r"goes over 'prox\.mu' twice"):
        sweep("fedprox", BASE, ["prox.mu=1,2", "fedprox.mu=3,4"], 1, out=tmp_path)


def test_the_command_prints_every_format_and_defaults_to_declared_ranges(optuna: Any, tmp_path: Path) -> None:
    from consilience.cli.sweep import sweep as command
    app = typer.Typer()
    app.command()(command)
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({k: v for k, v in TINY.items() if k != "method"}))
    call = ["fedprox", "--config", str(config), "--trials", "2", "--rounds", "1", "--out", str(tmp_path / "out"), "--sampler", "random"]
    result = CliRunner().invoke(app, [*call, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document["over"]) == {"lr", "prox.mu"}
    assert len(document["trials"]) == 2
    marks = {"text": "fedprox, 2 trials", "markdown": "| trial | lr | prox.mu |", "latex": r"\toprule", "csv": "trial,lr,prox.mu"}
    for form, mark in marks.items():
        assert mark in CliRunner().invoke(app, [*call, "--format", form]).stdout


def test_a_sweep_whose_trials_all_fail_says_so_to_scripts(tmp_path: Path, optuna: Any) -> None:
    """It exited with 0, and what came after it went on without a best configuration."""
    from consilience.cli.sweep import sweep as command
    app = typer.Typer()
    app.command()(command)
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({k: v for k, v in TINY.items() if k != "method"}))
    call = ["fedavg", "--config", str(config), "--trials", "2", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, [*call, "--over", "lr=1e30,1e31"])
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["best"] is None
    assert all("non-finite" in trial["failure"] for trial in document["trials"])


def test_trials_that_were_made_before_say_nothing_of_the_time_left(tmp_path: Path, optuna: Any) -> None:
    class Ear(Watcher):
        def rounds_done(self, rounds: int) -> None:
            heard.append(("done", rounds))

        def rounds_found(self, rounds: int) -> None:
            heard.append(("found", rounds))
    heard: list[tuple[str, int]] = []
    for trials in (1, 2):
        heard.clear()
        sweep("fedprox", BASE, OVER[:1], trials, out=tmp_path / "s", watcher=Ear())
    assert heard[0] == ("found", 2)
    assert next(rounds for how, rounds in heard if how == "done") == 3


def test_a_sweep_goes_on_however_its_data_set_is_spelled(tmp_path: Path, optuna: Any, undisturbed: Sweep) -> None:
    """Earlier versions wrote it as it had been typed."""
    shutil.copytree(undisturbed.folder, tmp_path / "s")
    plan = json.loads((tmp_path / "s" / "sweep.json").read_text())
    plan["config"] |= {"split": "dirichlet( alpha=.5 )", "model": "mlp(hidden = (16,))"}
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(plan))
    assert sweep("fedprox", BASE, OVER, 4, out=tmp_path / "s").trials == undisturbed.trials
