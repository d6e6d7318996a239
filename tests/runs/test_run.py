"""`consilience.run`: what a result holds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import consilience
from consilience.cli import app
from consilience.core.federation import Federation
from consilience.data import from_arrays, load
from consilience.engines.choose import Choice
from consilience.engines.estimate import steps_per_round
from consilience.engines.rehearse import rehearse
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError, DataError
from consilience.runs import environment
from consilience.runs.files import read_json
from consilience.runs.reload import open_run
from consilience.runs.run import Listener


def test_records_hold_what_they_promise(tiny):
    result = consilience.run("scaffold+dbe", **tiny, participation=0.5)
    assert [r["round"] for r in result.records] == [0, 1, 2, 3]
    names = {f"client{i}" for i in range(4)} if "client0" in result.names else set(result.names)
    for record in result.records[1:]:
        assert set(record) >= {"round", "cohort", "lost", "idle", "exchanged", "loss", "losses", "bytes_up", "bytes_down", "global",
                               "personalised", "validation", "measured"}
        assert len(record["cohort"]) == 2
        assert set(record["losses"]) == set(record["cohort"])
        assert record["loss"] == pytest.approx(sum(record["losses"].values()) / 2)
        assert record["bytes_up"] > 0
        assert record["bytes_down"] > 0
        assert record["measured"]["seconds"] > 0
        for scores in (record["global"], record["personalised"]):
            each = scores["per_client"]
            assert set(each) == names
            assert all(0 <= v <= 1 for v in each.values())
            assert scores["worst"] == min(each.values()) == each[scores["worst_client"]]
            assert scores["mean"] == pytest.approx(sum(each.values()) / 4)
            assert scores["scored"] == "after aggregation, before local training"
            assert math.isfinite(scores["loss"])


def test_a_result_shows_itself_in_a_line(tiny):
    result = consilience.run("local", **tiny)
    accuracy = result.records[-1]["personalised"]["accuracy"]
    assert repr(result) == f"<Result: local on {result.data['name']}, 3 rounds, personalised {accuracy:.3f}; all rounds done>"
    result.records = [r for r in result.records if r["round"] == 1]
    assert ", 1 round, " in repr(result)


def test_progress_shows_rounds_scores_and_warnings_and_nothing_is_shown_unasked(tiny, capsys):
    with pytest.warns(consilience.ConsilienceWarning, match="only one client"):
        quiet = consilience.run("local", **tiny | {"batch": 1000, "last_batch": "keep", "rounds": 2}, clients=1, split="iid")
    assert capsys.readouterr() == ("", "")
    shown = consilience.run("local", **tiny | {"batch": 1000, "last_batch": "keep", "rounds": 2}, clients=1, split="iid", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Warning: There is only one client" in err
    assert "sequential engine" in err
    assert "2/2" in err
    assert [r["losses"] for r in shown.records] == [r["losses"] for r in quiet.records]
    with pytest.raises(ConfigError, match="progress or has a listener of yours, not both"):
        consilience.run("local", **tiny, progress=True, listener=Listener())


class Net(torch.nn.Module):
    """A model of a user's own, in the file that runs it."""

    def __init__(self, sample, classes):
        super().__init__()
        self.body, self.top = torch.nn.Linear(sample[0], 5), torch.nn.Linear(5, classes)

    def forward(self, x):
        return self.top(torch.relu(self.body(x)))


@pytest.fixture
def mine():
    x = torch.arange(240.0).view(80, 3).sin()
    return from_arrays(x.numpy(), (x[:, 0] > 0).long().numpy(), [i % 4 for i in range(80)])


def test_arrays_in_memory_are_divided_as_the_run_says(mine):
    result = consilience.run("fedavg", mine, split="iid", clients=5, validation=0.2, patience=1, rounds=2, batch=4)
    assert (result.data["split"], len(result.names), result.data["validation"]) == ("iid", 5, 0.2)
    with pytest.raises(ConfigError, match=r"Got tuple instead. Arrays become data with from_arrays\(x, y\)"):
        consilience.run("fedavg", (mine.x, mine.y))


def test_data_that_are_divided_already_are_not_said_to_be_divided_otherwise(mine):
    """The settings used to stand in the records though nothing had come of them."""
    data = load(mine, validation=0.2)
    for settings in ({"split": "iid"}, {"clients": 7}, {"validation": 0.1}, {"shift": "rotation(step=15)"}, {"data_seed": 3},
                     {"hold_out": ["1"]}, {"train_fraction": 0.5}, {"split_file": "other.json"}, {"transform": "standardise"},
                     {"hold_out": 1}, {"transform": 3}):
        with pytest.raises(ConfigError, match="divided already"):
            consilience.run("fedavg", data, rounds=1, batch=4, **settings)
    result = consilience.run("fedavg", data, rounds=2, batch=4, clients=4, split="by_group(group=client)", patience=1)
    assert result.scored[-1]["validation"] is not None


def test_patience_looks_at_validation_samples_that_the_data_bring_along(mine):
    """Rows with published parts need no setting for them: patience was refused, though samples to be judged by were there."""
    parts = torch.arange(80) // 4 % 4                        # of every client ten for training, five for validation, five for its test
    published = replace(mine, roles=(parts - 1).clamp(min=0))
    data = load(published, test="published")
    assert len(data.table.val.rows) == 20
    for given, settings in ((data, {}), (published, {"test": "published"})):
        result = consilience.run("fedavg", given, rounds=2, batch=4, patience=1, **settings)
        assert result.scored[-1]["validation"] is not None
    with pytest.raises(ConfigError, match="needs validation samples"):
        consilience.run("fedavg", load(mine), rounds=1, batch=4, patience=1)


def test_data_that_are_divided_already_may_be_said_to_be_divided_as_they_are(mine):
    """However that is written: `load` writes every setting out."""
    same = {"transform": "standardise", "train_fraction": 0.9, "hold_out": ["1"], "clients": 4, "split": "by_group(group=client)"}
    assert consilience.run("fedavg", load(mine, **{**same, "clients": None}), rounds=1, batch=4, **same).config["hold_out"] == ("1",)
    same = {"shift": "rotation(step=15)", "transform": "flip+normalise", "clients": 3}
    consilience.run("fedavg", load("digits", **same), rounds=1, **same)


def test_a_run_on_data_in_memory_is_opened_with_them(mine, tmp_path):
    data = load(mine)
    consilience.run("fedavg", data, rounds=1, batch=4, out=tmp_path / "a")
    with pytest.raises(DataError, match="was trained on data in memory"):
        open_run(tmp_path / "a")
    assert open_run(tmp_path / "a", data=data).federation.round_number == 1


def test_a_model_is_named_by_its_class(mine):
    by_class = consilience.run("fedavg", mine, model=Net, taps="head=top", rounds=1, batch=4)
    assert by_class.config["model"] == f"{__name__}:Net"
    named = consilience.run("fedavg", mine, model=f"{__name__}:Net", taps="head=top", rounds=1, batch=4)
    assert by_class.records[-1]["losses"] == named.records[-1]["losses"]
    for wrong in (Net((3,), 2), lambda sample, classes: Net(sample, classes)):
        with pytest.raises(ConfigError, match="initial values are drawn from the run's seed"):
            consilience.run("fedavg", mine, model=wrong, taps="head=top")


def test_code_that_no_file_holds_is_not_kept_in_a_folder(tmp_path):
    """A notebook's or a session's: an edited class would be answered with the old one's numbers."""
    code = """
from dataclasses import dataclass
import consilience

@dataclass(frozen=True)
class Mine(consilience.Part):
    name = "mine"
    def loss(self, v):
        return 0.0 * v.features.sum()

settings = dict(data="synthetic(samples=160, classes=3, clients=4, features=6)", rounds=1)
print(consilience.run("fedavg+__main__:Mine", **settings))
try:
    consilience.run("fedavg+__main__:Mine", **settings, out="kept")
except consilience.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-"], input=code, text=True, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("<Result: __main__:Mine")
    assert second.startswith("'mine' was typed in a session")


def test_without_a_display_warnings_are_python_s_own(tiny):
    """FedFM matches from round 21 on: three rounds of it are FedAvg's, which must not pass unheard."""
    with pytest.warns(consilience.ConsilienceWarning, match="anchors first acts in round 21, and the run has 3") as heard:
        consilience.run("fedfm", **tiny)
    own = [w.filename for w in heard if w.category is consilience.ConsilienceWarning]         # garbage of other tests may warn in between
    assert own == [__file__]                                    # the line that asked for the run, not one of the package
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        consilience.run("fedavg", **tiny)
        consilience.run("fedfm", **tiny, listener=Listener())       # it has heard them


def test_a_run_that_cannot_be_scored_says_so(tiny):
    with pytest.warns(consilience.ConsilienceWarning, match="no test samples .* so the run gives no accuracy"):
        result = consilience.run("fedavg", **tiny | {"train": 0.8, "validation": 0.2})
    assert result.records[-1]["global"]["accuracy"] is None


def test_rows_are_flat_numbers_for_a_frame(tiny):
    result = consilience.run("dbe", **tiny)
    rows = result.rows()
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["personalised/accuracy"] == result.records[-1]["personalised"]["accuracy"]
    assert all(isinstance(v, (int, float)) for row in rows for v in row.values())
    assert not any("per_client" in name for row in rows for name in row)


def test_pooled_accuracy_is_the_share_of_right_samples(tiny):
    """Counted here by hand: forward passes of the final global model over every client's test rows."""
    result = consilience.run("fedavg", **tiny)
    data = load(tiny["data"], validation=0.2)
    fed = result.federation
    right = [int((fed.program.network.forward(fed.model, data.x[c.test]).logits.argmax(1) == data.y[c.test]).sum()) for c in data.clients]
    last = result.records[-1]["global"]
    assert last["accuracy"] == pytest.approx(sum(right) / sum(len(c.test) for c in data.clients))
    assert last["per_client"] == {c.name: pytest.approx(r / len(c.test)) for c, r in zip(data.clients, right)}
    assert result.records[-1]["personalised"] == last               # nothing is personal


def test_when_models_are_scored_is_said(tiny):
    said = lambda method: consilience.run(method, **tiny | {"rounds": 1}).records[-1]["personalised"]["scored"]
    assert said("local") == "after local training"
    assert said("ditto") == "after their own local training"
    assert said("fedbabu") == "after aggregation and fine-tuning"


def test_methods_without_a_global_model_say_so(tiny):
    record = consilience.run("local", **tiny | {"rounds": 1}).records[-1]
    assert record["global"] is None
    assert "no global model" in record["no_global_model"]


def test_scores_come_every_so_many_rounds_and_at_the_end(tiny):
    result = consilience.run("fedavg", **tiny | {"rounds": 5, "eval_every": 2})
    assert [r["round"] for r in result.scored] == [2, 4, 5]
    assert result.summary()["last"]["round"] == 5


def test_a_document_is_json_and_keeps_times_apart(tiny):
    result = consilience.run("fedavg", **tiny)
    document = json.loads(json.dumps(result.document(), default=list, allow_nan=False))
    assert "measured" not in document["records"][0]
    assert [r["round"] for r in document["measured"]["rounds"]] == [1, 2, 3]


def test_summary_labels_the_best_rounds(tiny):
    result = consilience.run("fedavg", **tiny | {"rounds": 6})
    summary, scored = result.summary(), result.scored
    tests = [r["personalised"]["accuracy"] for r in scored]
    assert summary["best_by_test"]["personalised"]["accuracy"] == max(tests)
    assert summary["mean_of_best_five"] == pytest.approx(sum(sorted(tests)[-5:]) / 5)
    best = max(scored, key=lambda r: (r["validation"]["accuracy"], -r["round"]))
    assert summary["best_by_validation"]["round"] == best["round"]
    assert summary["bytes_up"] == sum(r["bytes_up"] for r in result.records)


def test_models_of_a_result(tiny):
    result = consilience.run("dbe", **tiny)
    state = result.global_model
    assert set(state) == set(result.federation.model["params"]) | set(result.federation.model["buffers"])
    name = result.names[1]
    assert torch.equal(result.personal_state(name)["personal/prbm/shift"], result.personal_state(1)["personal/prbm/shift"])
    assert bool(result.personal_state(name)["personal/prbm/shift"].abs().sum() > 0)


def test_data_given_in_python(tiny):
    data = load(tiny["data"], validation=0.2)
    given = consilience.run("fedavg", data, **{k: v for k, v in tiny.items() if k != "data"})
    named = consilience.run("fedavg", **tiny)
    strip = lambda result: [{k: v for k, v in r.items() if k != "measured"} for r in result.records]
    assert strip(given) == strip(named)


def test_a_listener_hears_everything(tiny):
    heard: list = []

    class Ear(Listener):
        def started(self, federation, rounds, done):
            heard.append(("started", rounds, done))

        def client_done(self, done, of):
            heard.append(("client", done, of))

        def scoring(self):
            heard.append("scoring")

        def round_done(self, record):
            heard.append(("round", record["round"]))

        def warned(self, message):
            heard.append(("warned", message))

    consilience.run("fedavg", **tiny | {"rounds": 2, "clients": 1, "eval_every": 2}, listener=Ear())
    assert heard[0] == ("warned", "There is only one client: this is ordinary training, without federation.")
    assert heard[1:] == [("started", 2, 0), ("client", 1, 1), ("round", 1), ("client", 1, 1), "scoring", ("round", 2)]


def test_the_commit_recorded_is_that_of_the_start(tiny, tmp_path, monkeypatch):
    """Somebody may commit, or check out another branch, while a long run goes on; what ran is what had been read before."""
    commits = iter("ab")

    def git(command, **how):
        return subprocess.CompletedProcess(command, 0, next(commits) if "rev-parse" in command else "", "")
    monkeypatch.setattr(environment.subprocess, "run", git)
    environment._git_state.cache_clear()
    try:
        consilience.run("fedavg", **tiny | {"rounds": 1}, out=tmp_path / "run")       # describes where it runs at its begin and at its end
    finally:
        environment._git_state.cache_clear()
    assert read_json(tmp_path / "run" / "environment.json")["git"] == {"commit": "a", "changed": False}


def test_early_stop_on_validation(tiny):
    """With a vanishing learning rate nothing improves: the first scoring is the best, two more end the run."""
    result = consilience.run("fedavg", **tiny | {"rounds": 9, "lr": 1e-12, "patience": 2})
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert result.stopped == "no better validation score in 2 scorings"


def test_unknown_settings_are_refused_in_python(tiny):
    with pytest.raises(ConfigError, match="Did you mean 'rounds'"):
        consilience.run("fedavg", round=3)
    with pytest.raises(ConfigError, match="cuda"):
        consilience.run("fedavg", **tiny, device="cuda:99" if not torch.cuda.is_available() else "tpu")


def test_clients_held_out_are_scored_but_never_trained_on():
    result = consilience.run("fedavg", "digits", clients=5, split="iid", rounds=2, hold_out=("client1", "3"), batch=10)
    assert result.names == ("client0", "client2", "client4")
    assert set(result.records[-1]["held_out"]["per_client"]) == {"client1", "client3"}
    assert {name for r in result.records for name in r["cohort"]} == {"client0", "client2", "client4"}


def test_a_fraction_of_the_training_samples():
    whole, part = (consilience.data.load("digits", "iid", 4, train_fraction=f) for f in (None, 0.25))
    for a, b in zip(whole.clients, part.clients):
        assert len(b.train) == len(a.train) // 4
        assert set(b.train.tolist()) < set(a.train.tolist())
        assert b.test.equal(a.test)


def test_a_run_in_slots_is_rehearsed_first_and_says_what_was_seen(tiny, monkeypatch, tmp_path):
    """Slots need a GPU; here an engine of the CPU goes by that name. A rehearsal is made to see half a second a step, two a visit."""
    seen, loop = [], sys.modules["consilience.runs.run"]                        # `consilience.runs.run` is the function

    def rehearsed(fed):
        real = rehearse(fed)
        seen.append((fed.round_number, type(fed.engine)))
        return replace(real, step=0.5, visit=2.0, memory=3 << 30)
    monkeypatch.setattr(loop, "choose", lambda *args, **how: Choice("slots", "made up", Sequential))
    monkeypatch.setattr(loop, "rehearse", rehearsed)

    class Ear(Listener):
        said: ClassVar[list[str]] = []

        def noted(self, message):
            self.said.append(message)
    result = consilience.run("scaffold+dbe", out=tmp_path / "r", listener=Ear(), **tiny)
    assert seen == [(0, Sequential)]
    seconds = 0.5 * steps_per_round(result.federation) + 2.0 * 4
    assert Ear.said[0].startswith("slots engine (made up); needs about ")
    assert Ear.said[0].endswith(f", about {seconds:.1f} s of training a round")
    assert " of memory, 3 GiB of the GPU's, " in Ear.said[0]
    consilience.run("scaffold+dbe", out=tmp_path / "r", **tiny)                 # it is finished
    assert len(seen) == 1
    monkeypatch.undo()
    plain = consilience.run("scaffold+dbe", **tiny)
    assert all(torch.equal(t, plain.global_model[k]) for k, t in result.global_model.items())


def test_a_run_on_data_that_load_divided_is_opened_and_resumed_from_its_folder(tmp_path, monkeypatch):
    """The folder used to name the data set and not how `load` had divided it, so that nothing but Python could open it again."""
    x = np.sin(np.arange(240.0)).reshape(80, 3)
    np.savez(tmp_path / "mine.npz", x=x, y=x[:, 0] > 0, client=[str(7 - i % 4) for i in range(80)])
    monkeypatch.setattr(Federation, "round", _stops_after(1))
    # a client by a name that is another's number, and a seed that is not the run's
    mine = load('arrays(path="mine.npz")', seed=3, validation=0.2, train_fraction=0.9, transform="standardise", hold_out=["5"],
                data_dir=tmp_path)
    assert mine.description["held_out"] == ["5"]
    with pytest.raises(KeyboardInterrupt):
        consilience.run("fedavg", mine, rounds=3, batch=4, out=tmp_path / "a")
    monkeypatch.undo()
    opened = open_run(tmp_path / "a")
    assert opened.data.split_hash() == mine.split_hash()
    assert opened.data.description == mine.description
    assert opened.federation.round_number == 1
    resumed = CliRunner().invoke(app, ["resume", str(tmp_path / "a"), "--json"])
    assert resumed.exit_code == 0, resumed.output
    whole = consilience.run("fedavg", mine, rounds=3, batch=4)
    assert [r["losses"] for r in json.loads(resumed.stdout)["records"]] == [r["losses"] for r in whole.records]
    measured = CliRunner().invoke(app, ["measure", str(tmp_path / "a"), "accuracy", "--json"])
    assert measured.exit_code == 0, measured.output


def _stops_after(rounds):
    """Federation.round, interrupted once so many are done."""
    go_on = Federation.round

    def round_(fed):
        if fed.round_number == rounds:
            raise KeyboardInterrupt
        return go_on(fed)
    return round_


def test_a_changed_copy_of_divided_data_is_not_taken_for_what_load_would_give(tmp_path):
    data = load("digits", clients=5)
    fewer = replace(data, clients=data.clients[:4])
    consilience.run("fedavg", fewer, rounds=1, steps=1, out=tmp_path)
    with pytest.raises(DataError, match=r"divided differently now.*open_run\(path, data=…\)"):
        open_run(tmp_path)
    assert open_run(tmp_path, data=fewer).data is fewer


def test_a_run_whose_folder_does_not_say_how_its_data_were_divided_goes_on(tmp_path):
    """Folders of earlier versions; what came of the division stands beside."""
    data = load("digits", "iid", 5)
    consilience.run("fedavg", data, rounds=1, steps=1, out=tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["config"] |= {"split": None, "clients": None, "data_seed": None}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert consilience.run("fedavg", data, rounds=1, steps=1, out=tmp_path).records[-1]["round"] == 1
    with pytest.raises(ConfigError, match="holds a run with clients = 5, not 6"):
        consilience.run("fedavg", load("digits", "iid", 6), rounds=1, steps=1, out=tmp_path)
