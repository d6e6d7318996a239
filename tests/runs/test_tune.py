"""Tuning: declared ranges, equal budgets, choice by validation alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.errors import ConfigError
from consilience.parts.presets import PRESETS
from consilience.report.tables import Table
from consilience.runs import many
from consilience.runs.compare import compare_config
from consilience.runs.comparison import Comparison
from consilience.runs.config import RunConfig
from consilience.runs.entries import Entry, make_entries
from consilience.runs.tune import (
    LEARNING_RATES,
    Dimension,
    Search,
    Tuning,
    at,
    draw,
    space_of,
    tune_entries,
    tuning_seed,
    validation_scores,
    with_validation,
)

TINY = {"data": "digits", "split": "dirichlet(alpha=0.5)", "clients": 4, "rounds": 2, "steps": 3, "batch": 16, "validation": 0.2,
        "model": "mlp(hidden=(16,))"}
BASE = RunConfig.make(TINY)
METHODS, SEEDS, BUDGET = ["fedavg", "fedprox"], [0, 1], 3


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("tuned")
    return out, compare_config(METHODS, BASE, SEEDS, out=out, jobs=1, tune=BUDGET, save=True)


def tuning_of(comparison: Comparison) -> Tuning:
    assert comparison.tuning is not None
    return comparison.tuning


def space(method: str, **values: Any) -> dict[str, tuple[Any, ...]]:
    (entry,), _ = make_entries([method], RunConfig.make(values), with_local=False)
    return {d.name: d.values for d in space_of(entry, RunConfig.make(values))}


# ---- what is searched ------------------------------------------------------------------------------------------------

def test_a_method_without_options_searches_its_learning_rate() -> None:
    assert space("fedavg") == space("local") == {"lr": LEARNING_RATES["sgd"]}
    assert space("fedavg", optimiser="adam") == {"lr": LEARNING_RATES["adam"]}


def test_declared_ranges_are_searched_and_given_settings_are_not() -> None:
    assert space("fedprox") == {"lr": LEARNING_RATES["sgd"], "prox.mu": (0.001, 0.01, 0.1, 1.0)}
    assert space("fedprox(mu=0.3)") == space("fedavg")
    assert set(space("dbe")) == {"lr", "mr.kappa", "mr.momentum"}
    assert set(space("dbe(kappa=3)+fedprox")) == {"lr", "mr.momentum", "prox.mu"}
    (entry,), _ = make_entries(["fedavg"], BASE, False, {"fedavg": {"lr": 0.3}})
    assert space_of(entry, BASE) == ()


def test_what_a_preset_sets_together_moves_together() -> None:
    for method in ("lfd", "cosine+drift"):
        (entry,), _ = make_entries([method], BASE, False)
        found = space_of(entry, BASE)
        tau = next(d for d in found if d.name == "lfd.tau")
        assert set(tau.targets) == {"cosine.tau", "drift.tau"}
        point = {d.name: d.values[0] for d in found}
        parts = {p.name: p for p in at(entry, found, point).config(BASE, 0).stack().parts}
        assert parts["cosine"].tau == parts["drift"].tau == tau.values[0] != 0.1       # type: ignore[attr-defined]
    (entry,), _ = make_entries(["cosine(tau=0.3)+drift(tau=0.3)"], BASE, False)
    assert "lfd.tau" not in {d.name for d in space_of(entry, BASE)}


@pytest.mark.parametrize("method", sorted(PRESETS))
def test_every_declared_value_can_be_run(method: str) -> None:
    entry = Entry(method, method)
    for dimension in space_of(entry, BASE):
        for value in dimension.values:
            at(entry, [dimension], {dimension.name: value}).config(BASE, 0)


# ---- the draw --------------------------------------------------------------------------------------------------------

GRID = (Dimension("a", ("a",), (1, 2, 3)), Dimension("b", ("b",), (1, 2, 3, 4)))


@given(st.integers(1, 20), st.integers(0, 1000))
def test_points_are_drawn_without_replacement_and_more_begin_with_the_same(count: int, seed: int) -> None:
    points = draw(GRID, count, seed, "x")
    assert len(points) == len({tuple(p.items()) for p in points}) == min(count, 12)
    assert draw(GRID, 20, seed, "x")[: len(points)] == points
    assert all(p["a"] in (1, 2, 3) and p["b"] in (1, 2, 3, 4) for p in points)


def test_draws_depend_on_seed_and_method_and_skip_what_is_not_allowed() -> None:
    assert draw(GRID, 12, 0, "x") != draw(GRID, 12, 1, "x")
    assert draw(GRID, 12, 0, "x") != draw(GRID, 12, 0, "y")
    assert {p["a"] for p in draw(GRID, 12, 0, "x", lambda p: p["a"] != 2)} == {1, 3}
    assert draw((), 3, 0, "x") == [{}]                                  # nothing to search: the one configuration there is


def test_the_search_has_a_seed_of_its_own_that_more_seeds_do_not_move() -> None:
    assert tuning_seed([0, 1]) == tuning_seed([0, 1, 2, 3]) == 1_000_000
    assert tuning_seed([0, 1_000_000]) not in (0, 1_000_000)


# ---- the choice ------------------------------------------------------------------------------------------------------

def test_validation_scores_follow_the_tables_rule() -> None:
    records = [{"validation": {"accuracy": a, "loss": 10 * a}} for a in (0.1, 0.6, 0.5, 0.4, 0.3, 0.2)] + [{"validation": None}, {}]
    assert validation_scores(records, "last") == pytest.approx((0.2, 2.0))
    assert validation_scores(records, "best_by_validation") == pytest.approx((0.6, 6.0))
    assert validation_scores(records, "mean_of_best_five") == pytest.approx((0.4, 4.0))        # (.6 + .5 + .4 + .3 + .2) / 5
    assert validation_scores([{}], "last") is None


def test_ties_go_to_the_lower_loss_and_then_to_the_earlier_draw() -> None:
    trial = lambda n, accuracy, loss: {"trial": n, "validation": accuracy, "loss": loss, "settings": {}, "failure": None}
    best = lambda *trials: (Search((), list(trials)).best() or {})["trial"]
    assert best(trial(0, 0.5, 1.0), trial(1, 0.6, 9.0)) == 1
    assert best(trial(0, 0.6, 1.0), trial(1, 0.6, 0.5)) == 1
    assert best(trial(0, 0.6, 0.5), trial(1, 0.6, 0.5)) == 0
    assert best(trial(0, None, None), trial(1, 0.0, 5.0)) == 1


class Poison:
    """A test score that nobody may look at."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("a test score was read")

    __bool__ = __getitem__ = __iter__ = __len__ = __eq__ = __lt__ = __float__ = get = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def test_the_search_never_reads_a_test_score(tuned: tuple[Path, Comparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = many._attempt

    def poisoned(*args: Any) -> Any:
        document, warnings = real(*args)
        assert isinstance(document, dict)
        for record in document["records"]:
            record["global"] = record["personalised"] = Poison()
        return {**document, "summary": Poison()}, warnings

    monkeypatch.setattr(many, "_attempt", poisoned)
    entries, _ = make_entries(METHODS, BASE)
    found = tune_entries(entries, BASE, SEEDS, BUDGET, out=tmp_path, jobs=1)
    assert found.document() == tuning_of(tuned[1]).document()


# ---- the comparison --------------------------------------------------------------------------------------------------

def test_every_method_has_the_same_budget_on_a_seed_that_is_not_compared(tuned: tuple[Path, Comparison]) -> None:
    out, comparison = tuned
    tuning = tuning_of(comparison)
    assert {name: len(s.trials) for name, s in tuning.searches.items()} == {"local": 3, "fedavg": 3, "fedprox": 3}
    configs = [json.loads(p.read_text())["config"] for p in out.glob("*/config.json")]
    assert sorted(c["seed"] for c in configs) == [0] * 3 + [1] * 3 + [1_000_000] * 9
    assert all(c["validation"] == 0.2 for c in configs)


def test_the_chosen_settings_are_the_best_by_validation_and_are_those_compared(tuned: tuple[Path, Comparison]) -> None:
    out, comparison = tuned
    for row in comparison.rows():
        trials = tuning_of(comparison).searches[row["name"]].trials
        top = max(t["validation"] for t in trials)
        assert row["tuned"] in [t["settings"] for t in trials if t["validation"] == top]
        for folder in row["folders"].values():
            config = json.loads((out / folder / "config.json").read_text())["config"]
            mu = {"prox.mu": config["settings"].get("prox.mu", 0.01)} if row["name"] == "fedprox" else {}
            assert {"lr": config["lr"], **mu} == row["tuned"]


def test_the_search_is_part_of_what_is_printed_and_saved(tuned: tuple[Path, Comparison]) -> None:
    out, comparison = tuned
    saved = json.loads((out / "comparison.json").read_text())
    assert saved["tuning"]["budget"] == 3
    assert len(saved["tuning"]["methods"]["fedprox"]["trials"]) == 3
    assert "The search" in (out / "comparison.md").read_text()
    notes = "\n".join(comparison.table().notes)
    assert "Tuned: 3 configurations for every method on seed 1000000, which is not compared" in notes
    assert "Chosen for fedprox: lr=" in notes
    assert "data_seed=0 keeps them apart" in notes
    assert sum(row[-1] == "chosen" for row in tuning_of(comparison).table().rows) == 3


def test_a_tuned_comparison_is_only_read_and_a_larger_budget_keeps_what_was_searched(
        tuned: tuple[Path, Comparison], monkeypatch: pytest.MonkeyPatch) -> None:
    out, first = tuned
    calls: list[RunConfig] = []
    real = many.run_config
    monkeypatch.setattr(many, "run_config", lambda config, **rest: (calls.append(config), real(config, **rest))[1])
    assert compare_config(METHODS, BASE, SEEDS, out=out, jobs=1, tune=BUDGET).document() == first.document()
    assert not calls
    entries, _ = make_entries(METHODS, BASE)
    more = tune_entries(entries, BASE, SEEDS, BUDGET + 1, out=out, jobs=1)
    assert len(calls) == 3                                              # one more for each of local, fedavg, fedprox
    assert more.searches["fedprox"].trials[:3] == tuning_of(first).searches["fedprox"].trials


def test_a_search_without_any_score_fails_its_row_only(tmp_path: Path) -> None:
    broken = compare_config(["fedavg", "fedprox"], BASE, [0], out=tmp_path, jobs=1, tune=1, overrides={"fedprox": {"lr": 1e30}})
    assert set(broken.failures) == {("fedprox", 0)}
    assert "no configuration of its search finished" in broken.failures["fedprox", 0]
    assert broken.values("fedavg", "personalised", "accuracy")[0] is not None


@pytest.mark.parametrize("wild", [1e30, 1e35])           # 1e35 leaves parameters that are finite, and outputs that are not
def test_points_that_diverge_are_the_worst_and_are_said(wild: float, tmp_path: Path) -> None:
    base = BASE.replace(rounds=1, steps=1 if wild > 1e30 else 3)
    comparison = compare_config(["fedavg"], base, [0], out=tmp_path, jobs=1, tune=2, learning_rates=(0.1, wild), with_local=False)
    table = tuning_of(comparison).table()
    assert {row[2]: row[3:] for row in table.rows} == {f"lr={wild}": ["failed", ""], "lr=0.1": [table_score(table), "chosen"]}
    assert [note.partition(": ")[2].partition(" ")[0] for note in table.notes] == ["Training"]
    assert "Use a smaller learning rate than" in table.notes[0]
    assert not comparison.failures


def table_score(table: Table) -> str:
    return next(f"{trial['validation']:.3f}" for trial in table.data if trial["chosen"])


def test_a_small_grid_is_tried_whole_and_said() -> None:
    search = Search((), [{"trial": 0, "validation": 0.5, "loss": 1.0, "settings": {"lr": 0.1}, "failure": None}])
    notes = Tuning(5, 9, "last", {"fedavg": search}).notes()
    assert "fedavg has no more than 1 to choose from; all were tried." in notes


# ---- validation samples ----------------------------------------------------------------------------------------------

def test_validation_samples_are_taken_and_said_where_none_were_asked_for() -> None:
    base, said = with_validation(RunConfig.make({**TINY, "validation": None}))
    assert base.run.validation == 0.1
    assert said == ["Validation: a fraction of 0.1 of every client's samples in all runs, since none was given."]
    assert with_validation(BASE) == (BASE, [])
    with pytest.raises(ConfigError, match=r"validation=0 asks for none\. Set validation=0\.1 or so, or leave it out: then 0\.1 is taken"):
        with_validation(RunConfig.make({**TINY, "validation": 0}))
    with pytest.raises(ConfigError, match=r"train=0.95 leaves no room"):
        with_validation(RunConfig.make({**TINY, "validation": None, "train": 0.95}))
    with pytest.raises(ConfigError, match="at least 1 configuration"):
        tune_entries([], BASE, [0], 0)
