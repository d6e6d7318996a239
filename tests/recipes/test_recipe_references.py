"""Numbers that are taken from other rows and columns, from held-out clients, and with settings changed."""

from __future__ import annotations

import pytest
from tiny_recipe import entry

from consilience.errors import ConfigError
from consilience.recipes.load import load_recipe
from consilience.recipes.orders import Order
from consilience.recipes.run import reproduce

REFERENCES = """
title = "References"
[run]
data = "digits"
split = "iid"
clients = 3
rounds = 2
lr = 0.1
[score]
model = "global"
average = "clients"
[columns.zero]
run = { hold_out = ["client0"] }
score = { samples = "held_out" }
[columns.one]
run = { hold_out = ["client1"] }
score = { samples = "held_out", client = "client1" }
[columns.mean]
mean_of = ["zero", "one"]
[columns.gap]
mean_of = ["zero"]
minus = ["one"]
[columns.rounds]
unit = ""
run = { hold_out = ["client0"] }
score = { reach_row = "fedavg", samples = "held_out", select = "last" }
[rows.fedavg]
method = "fedavg"
[rows.quick]
method = "fedavg"
run = { lr = 0.3 }
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    (folder / "mine.toml").write_text(REFERENCES, encoding="utf-8")
    return reproduce(load_recipe(folder / "mine.toml"), folder / "out", jobs=1)


def test_a_client_that_is_left_out_is_scored(outcome):
    e = entry(outcome, "fedavg", "zero")
    assert e.runs[0].config["hold_out"] == ["client0"]
    last = e.runs[0].records[-1]
    assert list(last["held_out"]["per_client"]) == ["client0"]
    assert "client0" not in last["global"]["per_client"]
    assert e.values[0] == pytest.approx(100 * last["held_out"]["mean"])
    one = entry(outcome, "fedavg", "one")
    assert one.values[0] == pytest.approx(100 * one.runs[0].records[-1]["held_out"]["per_client"]["client1"])


def test_mean_and_difference_of_columns(outcome):
    zero, one = (entry(outcome, "quick", name).values[0] for name in ("zero", "one"))
    assert entry(outcome, "quick", "mean").values[0] == pytest.approx((zero + one) / 2)
    assert entry(outcome, "quick", "gap").values[0] == pytest.approx(zero - one)
    assert not entry(outcome, "quick", "mean").runs                     # nothing is run for it


def test_a_threshold_from_another_row(outcome):
    """FedAvg's last score; the other row gets there in its first or second round, or never."""
    limit = entry(outcome, "fedavg", "zero").runs[0].records[-1]["held_out"]["mean"]
    scores = [(r["round"], r["held_out"]["mean"]) for r in entry(outcome, "quick", "rounds").runs[0].records]
    first = next((n for n, s in scores if s >= limit - 1e-9), None)
    assert entry(outcome, "quick", "rounds").values == ({} if first is None else {0: first})
    own = [(r["round"], r["held_out"]["mean"]) for r in entry(outcome, "fedavg", "zero").runs[0].records]
    assert entry(outcome, "fedavg", "rounds").values == {0: next(n for n, s in own if s >= limit - 1e-9)}


WRONG = {
    "unknown column of a mean": ('mean_of = ["zero", "one"]', 'mean_of = ["zero", "two"]', "columns.mean.mean_of: 'two'"),
    "unknown column of a difference": ('minus = ["one"]', 'minus = ["two"]', "columns.gap.mean_of: 'two'"),
    "a difference from nothing": ('mean_of = ["zero"]\nminus', "minus", "columns.gap.minus needs mean_of"),
    "a mean that is run": ('mean_of = ["zero", "one"]', 'mean_of = ["zero", "one"]\nrun = { lr = 0.5 }', "so that its run is never made"),
    "a row that is not there": ('reach_row = "fedavg"', 'reach_row = "fedavgg"', "the row 'fedavgg' of its threshold"),
    "a column the row lacks": ('method = "fedavg"\nrun = { lr = 0.3 }', 'method = "fedavg"\nonly = ["zero", "mean"]', "no column 'one'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_references_to_nothing_are_refused(what, tmp_path):
    old, new, message = WRONG[what]
    text = REFERENCES
    assert old in text
    (tmp_path / "mine.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.toml") as error:
        load_recipe(tmp_path / "mine.toml")
    assert message in str(error.value)


def test_changed_settings_are_said_everywhere_and_have_folders_of_their_own(tiny, tmp_path):
    recipe = load_recipe(tiny)
    changed = Order(("fedavg",), ("accuracy",), 1, 0.25, changed=(("weights", "uniform"),))
    outcome = reproduce(recipe, tmp_path, changed, jobs=1)
    run = entry(outcome, "fedavg", "accuracy").runs[0]
    assert run.config["weights"] == "uniform"
    assert "CHANGED: weights=uniform" in outcome.table().plain()
    assert outcome.document()["changed"] == {"weights": "uniform"}
    for form in ("text", "markdown", "latex", "csv", "json"):
        said = {"csv": ",weights=uniform,", "json": '"weights": "uniform"'}.get(form, "CHANGED: weights=uniform")
        assert said in outcome.table().render(form), form
    assert "-o weights=uniform" in outcome.command
    plain = reproduce(recipe, tmp_path, Order(("fedavg",), ("accuracy",), 1, 0.25), train=False)
    assert entry(plain, "fedavg", "accuracy").state == "not run"
    with pytest.raises(ConfigError, match="--rounds-scale"):
        Order(changed=(("rounds", "3"),))


def test_how_numbers_are_computed_is_said_and_is_no_change(tiny, tmp_path):
    """The layout of memory: still the table's numbers. What the precision does stands beside it."""
    recipe = load_recipe(tiny)

    def said(**settings: str) -> tuple[str, str]:
        outcome = reproduce(recipe, tmp_path, Order(("fedavg",), ("accuracy",), 1, changed=tuple(settings.items())), train=False)
        return outcome.label, outcome.table().plain()

    label, text = said(layout="channels_last")
    assert label == ""
    assert "Computed with layout=channels_last: not what is computed but how, so sums may run in another order." in text
    for carried_out in ({"engine": "sequential"}, {"device": "cpu"}, {"track": "tensorboard"}, {"store": "disk"}):
        assert said(**carried_out)[0] == ""
    label, text = said(layout="channels_last", precision="bfloat16")
    assert label == "CHANGED: precision=bfloat16, so these are not the table's numbers"
    assert "Computed with layout=channels_last:" in text
