"""Scores by measures that a run takes on its way, with a choice of rounds as accuracies have it."""

from __future__ import annotations

import pytest
from tiny_recipe import TINY, load_tiny

from consilience.errors import ConfigError
from consilience.recipes.collect import collect
from consilience.recipes.folders import cell_values
from consilience.recipes.format import Score
from consilience.recipes.load import load_recipe
from consilience.recipes.orders import Order
from consilience.recipes.results import write_results
from consilience.recipes.run import reproduce
from consilience.recipes.score import value_of
from consilience.runs.folder import read_records

MEASURED = (TINY.replace("lr = 0.1", 'lr = 0.1\nmeasure = ["forgetting"]\nmeasure_every = 2').replace("rounds = 4", "rounds = 5")
            .replace('{ measure = "forgetting", value = "present.lp" }', '{ taken = "forgetting.present.lp" }')
            .replace('[columns.accuracy]', '[[also]]\ntitle = "worst client"\nscore = { average = "worst" }\n\n[columns.accuracy]'))


def record(number, mean=None):
    """A scored round; where `mean` is given the measure was taken at it."""
    return {"round": number, "global": {"accuracy": 0.9, "mean": 0.9}, "personalised": {"accuracy": 0.9, "mean": 0.9},
            **({} if mean is None else {"measures": {"shifted_test": {"mean": mean, "worst_client": "3"}}})}


def test_rounds_are_chosen_among_those_it_was_taken_at():
    records = [record(1), record(2, 0.2), record(3), record(4, 0.6), record(6, 0.5), record(8, 0.1), record(10, 0.4), record(12, 0.3),
               record(13)]
    assert value_of(Score(taken="shifted_test.mean", select="last"), records) == 0.3
    assert value_of(Score(taken="shifted_test.mean", select="best"), records) == 0.6
    # the five best of six: 0.6 + 0.5 + 0.4 + 0.3 + 0.2 = 2.0, over five
    assert value_of(Score(taken="shifted_test.mean", select="best5"), records) == pytest.approx(0.4)
    assert value_of(Score(taken="shifted_test.mean", select="best", report="round"), records) == 4
    assert value_of(Score(taken="shifted_test.mean", reach=0.5), records) == 4
    assert value_of(Score(taken="drift.mean"), records) is None
    with pytest.raises(ConfigError, match="has no value 'median'"):
        value_of(Score(taken="shifted_test.median"), records)


def test_a_measure_that_could_not_be_taken_has_no_number():
    assert value_of(Score(taken="shifted_test.mean"), [{**record(1), "measures": {"shifted_test": {"left_out": "why"}}}]) is None


def test_the_sentence_says_what_is_scored():
    assert Score(taken="shifted_test.mean", select="best5").sentence() == (
        "mean of the measure shifted_test, averaged over the five best rounds (chosen by the test samples themselves), "
        "among those it was taken at")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    recipe = load_tiny(folder, MEASURED)
    order = Order(("fedavg",), (), 1)
    return recipe, order, reproduce(recipe, folder / "out", order, jobs=1)


def entry(outcome, column):
    return next(e for e in outcome.entries if (e.cell.row.name, e.cell.column.name) == ("fedavg", column))


def test_a_run_takes_its_measures_every_so_many_rounds_and_after_the_last(measured):
    _, _, outcome = measured
    run = entry(outcome, "kept").runs[0]
    assert run.path == entry(outcome, "accuracy").runs[0].path            # one run for both columns
    records = read_records(run.path / "records.jsonl")
    assert [r["round"] for r in records if "measures" in r] == [2, 4, 5]
    taken = [r["measures"]["forgetting"]["present"]["lp"] for r in records if "measures" in r]
    assert entry(outcome, "kept").values[0] == max(taken)
    assert not (run.path / "recipe_measures.json").exists()               # nothing is measured once more at the end
    # of the two scores beside the first one, the worst client's has nothing to do with this measure
    assert entry(outcome, "kept").also == {"last round": {0: taken[-1]}}
    assert set(entry(outcome, "accuracy").also) == {"last round", "worst client"}


def test_records_as_csv_keep_what_was_taken(measured, tmp_path):
    recipe, order, outcome = measured
    write_results(outcome, order, tmp_path)
    again = collect(recipe, tmp_path / "records", order)
    assert entry(again, "kept").values[0] == pytest.approx(entry(outcome, "kept").values[0], abs=1e-5)
    assert entry(again, "kept").also["last round"][0] == pytest.approx(entry(outcome, "kept").also["last round"][0], abs=1e-5)


def test_the_schedule_shrinks_with_the_rounds(tmp_path):
    (tmp_path / "tiny.toml").write_text('scaled = ["measure_every"]\n' + MEASURED.replace("rounds = 5", "rounds = 100")
                                        .replace("measure_every = 2", "measure_every = 50"), encoding="utf-8")
    recipe = load_recipe(tmp_path / "tiny.toml")
    values = cell_values(recipe.select(["fedavg"], ["kept"])[0], 0, scale=0.1, scaled=recipe.scaled)
    assert (values["rounds"], values["measure_every"]) == (10, 5)


WRONG = {
    "not among the run's measures": ('measure = ["forgetting"]', 'measure = ["drift"]', "which its run does not take"),
    "no measures at all": ('measure = ["forgetting"]\n', "", "which its run does not take"),
    "no place of the number": ("forgetting.present.lp", "forgetting", "a measure of the run and the place of the number"),
    "both kinds of measures": ('taken = "forgetting.present.lp"', 'taken = "forgetting.present.lp", measure = "drift", value = "mean"',
                               "stands alone"),
    "schedule of nothing": ("measure_every = 2", "measure_every = 0", "must be at least 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_refused_when_the_file_is_read(what, tmp_path):
    old, new, message = WRONG[what]
    assert old in MEASURED
    (tmp_path / "tiny.toml").write_text(MEASURED.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "tiny.toml")


def test_the_nearer_level_says_when_a_measure_is_taken(tmp_path):
    """A row that is scored by a measure of the trained run, in a column whose other rows go by one taken on the way."""
    (tmp_path / "tiny.toml").write_text(MEASURED.replace('method = "fedavg"\n', 'method = "fedavg"\nscore = { measure = "forgetting", '
                                                         'value = "absent.lp" }\n', 1), encoding="utf-8")
    cells = {(c.row.name, c.column.name): c.score for c in load_recipe(tmp_path / "tiny.toml").cells}
    assert (cells["fedavg", "kept"].measure, cells["fedavg", "kept"].taken) == ("forgetting", None)
    assert (cells["dbe", "kept"].measure, cells["dbe", "kept"].taken) == (None, "forgetting.present.lp")
