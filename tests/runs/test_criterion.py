"""Runs that are judged by another measure than accuracy."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score

import consilience
from consilience.core.federation import Federation
from consilience.data import load
from consilience.errors import ConfigError
from consilience.metrics.criterion import pooled_measure
from consilience.metrics.registry import MEASURES, Measure, make_measures
from consilience.runs.compare import compare_config
from consilience.runs.comparison import Comparison, chosen_rounds
from consilience.runs.config import RunConfig
from consilience.runs.measure import criterion_of_round, measures_of_round
from consilience.runs.result import summarise
from consilience.runs.run import _Patience
from consilience.runs.scoring import only, scored_clients
from consilience.runs.tune import validation_scores

TWO = {"data": "synthetic(samples=240, classes=2, clients=4, features=6)", "rounds": 2, "lr": 0.1, "validation": 0.2,
       "model": "mlp(hidden=(8,))"}


def record(number, accuracy, value, judged):
    """A round that accuracy and the criterion see differently. `judged`: on validation samples."""
    scores = {"accuracy": accuracy, "mean": accuracy, "worst": accuracy, "loss": 1.0, "test": None, "per_client": {"a": accuracy}}
    own = {"value": value, "mean": value, "worst": value / 2, "worst_client": "a", "per_client": {"a": value}, "scored": ""}
    return {"round": number, "global": scores, "personalised": scores, "validation": {"accuracy": 1 - judged, "loss": float(number)},
            "criterion": {"measure": "auroc", "global": own, "personalised": own, "validation": judged}, "bytes_up": 0, "bytes_down": 0}


ROUNDS = [record(1, 0.9, 0.4, 0.5), record(2, 0.5, 0.8, 0.3), record(3, 0.7, 0.6, 0.9), record(4, 0.6, 0.7, 0.2)]


def test_a_round_is_scored_by_the_criterion(tmp_path):
    result = consilience.run("fedavg", **TWO, criterion="auroc", measure=["auroc"], out=tmp_path)
    last, data, fed = result.records[-1], load(TWO["data"], validation=0.2), result.federation
    assert last["criterion"]["global"]["value"] == last["measures"]["auroc"]["global"]["pooled"]
    assert last["criterion"]["global"]["per_client"] == last["measures"]["auroc"]["global"]["per_client"]
    assert last["criterion"]["global"]["worst"] == min(last["criterion"]["global"]["per_client"].values())
    assert last["criterion"]["personalised"] == last["criterion"]["global"]                 # nothing is personal
    rows = data.table.val.rows
    p = fed.program.network.forward(fed.model, data.x[rows]).logits.softmax(1)[:, 1].detach()
    assert last["criterion"]["validation"] == pytest.approx(roc_auc_score(data.y[rows], p))
    assert json.loads((tmp_path / "config.json").read_text())["config"]["criterion"] == "auroc"
    assert repr(result).startswith(f"<Result: fedavg on synthetic, 2 rounds, auroc: global {last['criterion']['global']['value']:.3f}")


@pytest.mark.parametrize("method", ["fedavg", "dbe", "local"])
def test_models_are_judged_after_local_training_too(method):
    """There the global model is nobody's: each client has what it made of it."""
    last = consilience.run(method, **TWO, criterion="auroc(training=after)", measure=["auroc(training=after)"]).records[-1]
    judged, measured = last["criterion"], last["measures"]["auroc"]
    of = measured["local" if method == "fedavg" else "personalised"]
    assert judged["global"] is None
    assert (judged["personalised"]["value"], judged["personalised"]["per_client"]) == (of["pooled"], of["per_client"])
    assert judged["validation"] is not None
    assert pooled_measure(last, "auroc") == of["pooled"]                   # a comparison's column


def asked_rows(monkeypatch, *given, **settings):
    """A run, and how many samples its models were asked about outside of training."""
    asked, look = [], Federation.look

    def counted(fed, number, state, model, x, *more):
        asked.append(len(x))
        return look(fed, number, state, model, x, *more)
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "look", counted)
        return consilience.run(*given, **settings, engine="sequential"), sum(asked)


@pytest.mark.parametrize(("method", "more"), [("fedavg", {}), ("dbe", {"eval_clients": 2}), ("local", {}), ("fedper", {"hold_out": ["1"]})])
def test_a_judged_round_asks_every_model_once(method, more, monkeypatch):
    """Accuracy, the criterion and a measure of answers are read from one pass, and are what each would read from its own."""
    plain, usual = asked_rows(monkeypatch, method, **TWO, **more)
    judged, both = asked_rows(monkeypatch, method, **TWO, **more, criterion="auroc", measure=["calibration"])
    assert both == usual > 0
    scores = ("global", "personalised", "validation", "held_out", "losses")
    assert [[r.get(k) for k in scores] for r in plain.records] == [[r.get(k) for k in scores] for r in judged.records]
    fed, data = judged.federation, load(TWO["data"], validation=0.2, hold_out=[1] if "hold_out" in more else ())
    drawn = scored_clients(fed, data, more.get("eval_clients"))
    last = judged.records[-1]
    assert last["criterion"] == criterion_of_round(fed, data if drawn is None else only(data, drawn), "auroc", drawn)
    assert last["measures"] == measures_of_round(fed, only(data, drawn), ["calibration"], clients=drawn)


def test_the_published_test_set_is_asked_about_once(monkeypatch):
    data = load(TWO["data"])
    data = replace(data, test=data.table.test.rows, clients=[c._replace(test=c.test[:0]) for c in data.clients])
    settings = {"rounds": 1, "model": "mlp(hidden=(8,))"}
    (_, usual), (judged, both) = (asked_rows(monkeypatch, "fedavg", data, **settings, **more) for more in ({}, {"criterion": "auroc"}))
    assert both == usual == len(data.test)
    p = judged.federation.program.network.forward(judged.federation.model, data.x[data.test]).logits.softmax(1)[:, 1].detach()
    assert judged.records[-1]["criterion"]["global"]["value"] == pytest.approx(roc_auc_score(data.y[data.test], p))


def test_clients_held_out_are_scored_by_the_criterion():
    result = consilience.run("dbe", **TWO, criterion="f1(positive=0)", hold_out=["1", "3"])
    data, fed, judged = load(TWO["data"], validation=0.2, hold_out=[1, 3]), result.federation, result.records[-1]["criterion"]["held_out"]
    predicted = [fed.program.network.forward(fed.model, data.x[c.test]).logits.argmax(1) for c in data.held_out]
    each = {c.name: f1_score(data.y[c.test], p, pos_label=0) for c, p in zip(data.held_out, predicted)}
    assert judged["per_client"] == pytest.approx(each)
    assert judged["value"] == pytest.approx(f1_score(torch.cat([data.y[c.test] for c in data.held_out]), torch.cat(predicted), pos_label=0))
    assert judged["worst"] == min(judged["per_client"].values())
    assert judged["scored"] == ("the global model after aggregation, before local training, on clients that take no part; positive is "
                                "class 0")
    assert result.summary()["last"]["criterion"]["held_out"]["value"] == judged["value"]
    for method, criterion in (("local", "auroc"), ("fedavg", "auroc(training=after)")):      # no model that could serve them
        assert "held_out" not in consilience.run(method, **TWO, criterion=criterion, hold_out=["1"]).records[-1]["criterion"]


def test_a_criterion_says_that_some_clients_were_drawn(tmp_path):
    base = RunConfig.make({**TWO, "criterion": "f1", "eval_clients": 2})
    made = compare_config(["dbe"], base, [0], out=tmp_path, jobs=1)
    last = made.documents["dbe", 0]["records"][-1]
    assert last["global"]["scored"].endswith(", on 2 of 4 clients drawn by the seed")
    for model in ("global", "personalised"):
        assert last["criterion"][model]["scored"].endswith("test samples, on 2 of 4 clients drawn by the seed; positive is class 1")
    assert "F1: positive is class 1." in made.table().notes
    assert "drawn" not in consilience.run("dbe", **TWO, criterion="f1").records[-1]["criterion"]["global"]["scored"]


def test_scoring_changes_no_training():
    plain, judged = (consilience.run("dbe", **TWO, **more) for more in ({}, {"criterion": "f1"}))
    assert [r["losses"] for r in plain.records] == [r["losses"] for r in judged.records]
    assert [r["personalised"] for r in plain.records] == [r["personalised"] for r in judged.records]


def test_without_one_settings_are_those_of_old_runs():
    """Folders are named by the settings, and a run goes on only under those it has."""
    assert "criterion" not in RunConfig.make(TWO).portable()
    assert RunConfig.make({**TWO, "criterion": "auroc"}).portable()["criterion"] == "auroc"
    assert RunConfig.make({**TWO, "criterion": "auroc"}).digest() != RunConfig.make(TWO).digest()


@pytest.mark.parametrize(("one", "same"), [("f1(positive=1)", "f1( positive = '1' )"), ("auroc", "auroc(rows=auto)"),
                                           ("f1", "f1(positive=none)"), ("f1(positive=yes)", 'f1(positive="yes")'),
                                           ("f1(positive='at home')", 'f1(positive="at home")')])
def test_a_measure_is_the_same_however_it_is_written(one, same):
    """Folders are named by the settings: runs that differ by quotes alone were two."""
    for name in ("criterion", "measure"):
        a, b = (RunConfig.make({**TWO, name: text}) for text in (one, same))
        assert a.portable() == b.portable()
        assert a.digest() == b.digest()
    assert RunConfig.make({**TWO, "measure": [one, same]}).run.measure == RunConfig.make({**TWO, "measure": one}).run.measure
    assert len(make_measures([one, same])) == 1
    assert make_measures([RunConfig.make({**TWO, "criterion": same}).run.criterion]) == make_measures([one])


def test_measures_of_different_classes_stay_different():
    zero, one = (RunConfig.make({**TWO, "criterion": f"f1(positive={c})"}).digest() for c in (0, 1))
    assert zero != one
    with pytest.raises(ConfigError, match="twice with different options"):
        make_measures(["f1(positive=0)", "f1(positive=1)"])
    # a class named none is not no class; what is not installed here stays as it was written
    assert RunConfig.make({**TWO, "criterion": "f1(positive='none')"}).run.criterion == "f1(positive='none')"
    assert RunConfig.make({**TWO, "criterion": "theirs(of = 'x')"}).run.criterion == "theirs(of = 'x')"


def test_a_run_goes_on_whose_folder_writes_its_criterion_with_quotes(tmp_path):
    settings = {**TWO, "rounds": 1, "criterion": "f1(positive='1')", "measure": ["f1(positive=1)"]}
    consilience.run("fedavg", **settings, out=tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["config"] |= {"criterion": "f1(positive=1)", "measure": ["f1(positive=1)"]}                 # as earlier versions kept them
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert len(consilience.run("fedavg", **settings, out=tmp_path).records) == 1
    with pytest.raises(ConfigError, match="holds a run with criterion"):
        consilience.run("fedavg", **{**settings, "criterion": "f1(positive=0)"}, out=tmp_path)


def test_rounds_are_chosen_by_the_criterion():
    assert [r["round"] for r in chosen_rounds(ROUNDS, "best_by_validation")] == [3]       # by accuracy on validation samples it is 4
    assert [r["round"] for r in chosen_rounds(ROUNDS, "best_by_test")] == [2]             # by accuracy 1
    summary = summarise(ROUNDS, "")
    assert (summary["best_by_validation"]["round"], summary["best_by_test"]["round"]) == (3, 2)
    assert summary["mean_of_best_five"] == pytest.approx((0.4 + 0.8 + 0.6 + 0.7) / 4)
    assert summary["last"]["criterion"]["personalised"] == {"value": 0.7, "mean": 0.7, "worst": 0.35}
    assert validation_scores(ROUNDS, "best_by_validation") == (0.9, 3.0)
    assert validation_scores(ROUNDS, "last") == (0.2, 4.0)
    assert not _Patience(2, ROUNDS).over                                                  # 0.5, 0.3, 0.9, 0.2: one since the best
    assert _Patience(1, ROUNDS).over


def test_a_comparison_goes_by_it_and_shows_other_measures(tmp_path):
    base = RunConfig.make({**TWO, "criterion": "auroc", "measure": ["f1", "drift"]})
    made = compare_config(["fedavg"], base, [0, 1], out=tmp_path, jobs=1)
    table = made.table()
    assert table.header[:5] == ["method", "global", "personalised", "worst client", "f1"]          # drift is no score
    last = [made.documents["fedavg", seed]["records"][-1] for seed in (0, 1)]
    row = made.rows()[1]
    assert row["personalised"]["values"] == [r["criterion"]["personalised"]["value"] for r in last]
    assert row["worst"]["values"] == [r["criterion"]["personalised"]["worst"] for r in last]
    assert row["measures"]["f1"]["values"] == [r["measures"]["f1"]["global"]["pooled"] for r in last]
    alone = [made.documents["local", seed]["records"][-1]["criterion"]["personalised"]["value"] for seed in (0, 1)]
    assert row["gain_over_local"]["difference"] == pytest.approx(sum(v - a for v, a in zip(row["personalised"]["values"], alone)) / 2)
    assert table.notes[0].startswith("Global, personalised and worst client: auroc of the last round")
    assert "personalised auroc minus" in table.notes[1]
    assert "F1: positive is class 1." in table.notes
    assert "Global and personalised take all clients' test samples together." in table.notes


def test_clients_have_a_table_where_they_are_the_same_with_every_seed(tmp_path):
    made = compare_config(["fedavg"], RunConfig.make(TWO), [0, 1], out=tmp_path, jobs=1)
    table = made.client_table()
    assert table.header == ["client", "local", "fedavg"]
    assert [r[0] for r in table.rows] == ["0", "1", "2", "3"]
    scores = [made.documents["fedavg", seed]["records"][-1]["personalised"]["per_client"]["2"] for seed in (0, 1)]
    assert table.data[2]["fedavg"]["values"] == scores
    for doc in made.documents.values():                          # judged by a measure that client 2, of one class, does not have
        doc["config"] = {**doc["config"], "criterion": "auroc"}
        own = {"value": 0.5, "worst": 0.5, "per_client": {"0": 0.5, "1": 0.5, "3": 0.5}}
        doc["records"][-1]["criterion"] = {"measure": "auroc", "global": own, "personalised": own, "validation": None}
    whole = Comparison(made.methods, made.seeds, made.documents, {}, "fedavg")
    lacking = whole.client_table()
    without = "Test samples that give no auroc of their own: 2 in 2 of 2 seeds. The worst client is one of the others."
    assert lacking.notes[1:] == [without]
    assert without in whole.table().notes
    assert [(r[0], r[2]) for r in lacking.rows] == [("0", "0.500 ± 0.000"), ("1", "0.500 ± 0.000"), ("2", "–"), ("3", "0.500 ± 0.000")]
    documents = {key: {**doc, "data": {**doc["data"], "split": "iid", "hash": str(key[1])}} for key, doc in made.documents.items()}
    drawn = Comparison(made.methods, made.seeds, documents, {}, "fedavg").client_table()
    assert (drawn.rows, "data_seed=0" in drawn.notes[0]) == ([], True)


@pytest.mark.parametrize(("criterion", "words"), [
    ("drift", "cannot be judged by 'drift'. Criteria: accuracy, auroc,"),
    ("auroc(rows=test)", "Leave `rows` out"),
    ("aurok", "Did you mean 'auroc'"),
    ("f1(positive=died)", "there is no class 'died' among 0, 1"),
])
def test_what_a_run_cannot_be_judged_by_is_refused_before_it_begins(criterion, words):
    with pytest.raises(ConfigError) as error:
        consilience.run("fedavg", **TWO, criterion=criterion)
    assert words in str(error.value)


def test_validation_samples_alone_are_judged_by_and_none_at_all_are_refused():
    with pytest.warns(consilience.ConsilienceWarning, match="no test samples"):
        result = consilience.run("fedavg", **TWO | {"train": 0.8}, criterion="auroc", patience=1)
    last = result.records[-1]["criterion"]
    assert (last["personalised"], last["validation"] is not None, "best_by_validation" in result.summary()) == (None, True, True)
    with pytest.raises(ConfigError, match="without test or validation samples"):
        consilience.run("fedavg", **TWO | {"train": 1.0, "validation": 0.0}, criterion="auroc")


def test_a_measure_without_rows_is_refused_by_what_it_lacks(monkeypatch):
    @dataclass(frozen=True)
    class Mine(Measure):
        name = "mine"
        judges = True
    monkeypatch.setitem(MEASURES, "mine", Mine)
    with pytest.raises(ConfigError, match="'mine': it must have an option `rows`"):
        consilience.run("fedavg", **TWO, criterion="mine")


def test_a_criterion_that_validation_samples_cannot_give_is_warned_of():
    with pytest.warns(consilience.ConsilienceWarning, match="auroc cannot be had on the validation samples"):
        consilience.run("fedavg", _lopsided(), criterion="auroc", rounds=1, batch=4)


def _lopsided():
    """No validation sample is positive."""
    data = load(TWO["data"], validation=0.2)
    for client in range(data.population):
        rows = data.table.val[client]
        data.y[rows] = 0
    return data
