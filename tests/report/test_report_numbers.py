"""The numbers behind the figures, each against a value worked out by hand."""

from __future__ import annotations

import json

import pytest
import torch
from stored_runs import write_run

from consilience import rng
from consilience.data import load
from consilience.data.federated import ClientRows
from consilience.errors import ConfigError, ConsilienceError
from consilience.report import curves
from consilience.report.clients import client_scores
from consilience.report.curves import draw_curves
from consilience.report.features import choose_samples, embed
from consilience.report.gather import gather
from consilience.report.report import clients_table, comparable, results_tables
from consilience.report.splits import picture_splits
from consilience.report.traces import find_traces


def rewrite(path, change) -> None:
    """Change the records of a run."""
    records = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    for record in records:
        change(record)
    (path / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def set_scores(path, each) -> None:
    def change(record):
        for model in ("global", "personalised"):
            if record[model]:
                record[model].update(per_client=each, accuracy=sum(each.values()) / len(each), worst=min(each.values()))
    rewrite(path, change)


def test_bytes_and_seconds_add_up_over_rounds_without_scores(tmp_path):
    path = write_run(tmp_path, rounds=4)
    rewrite(path, lambda r: r.update(personalised=None, **{"global": None}) if r["round"] % 2 else None)
    curve = draw_curves(gather([tmp_path]).groups)["groups"][0]["runs"][0]
    # 1500 bytes and half a second a round; rounds 2 and 4 are scored
    assert (curve["round"], curve["bytes"], curve["seconds"]) == ([2, 4], [3000, 6000], [1.0, 2.0])


def test_band_is_mean_and_standard_deviation_over_seeds(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        set_scores(write_run(tmp_path, seed=seed, rounds=3), {"a": accuracy})
    mean = draw_curves(gather([tmp_path]).groups)["groups"][0]["mean"]
    # mean of .5 and .7 is .6; deviations ±.1, so the sample variance is (.01 + .01)/1 and its root .14142
    assert mean["y"]["personalised"] == {"mean": [0.6] * 3, "std": [0.14142] * 3}


def test_what_runs_were_judged_by_and_measured_is_drawn(tmp_path):
    def judge(record):
        own = {"value": record["round"] / 10, "worst": 0.1, "per_client": {"a": 0.1, "b": record["round"] / 5}}
        record.update(criterion={"measure": "auroc", "global": own, "personalised": own, "validation": None},
                      measures={"f1": {"global": {"pooled": 0.25}}, "drift": {"whole": {"absolute": 1.0}}})
    rewrite(write_run(tmp_path, rounds=3), judge)
    groups = gather([tmp_path]).groups
    drawn = draw_curves(groups)
    assert [m["label"] for m in drawn["measures"]][:2] == ["auroc of the clients' models, the criterion", "f1 of the clients' models"]
    assert drawn["groups"][0]["runs"][0]["y"]["criterion"] == [0.1, 0.2, 0.3]
    assert drawn["groups"][0]["runs"][0]["y"]["measure:f1"] == [0.25] * 3
    (clients,) = client_scores(groups)
    assert (clients["measure"], clients["names"], clients["accuracy"]) == ("auroc", ["a", "b"], [0.1, 0.6])
    assert clients_table(groups, [clients]).notes[1] == f"By what runs were judged by: auroc for {groups[0].label}."
    assert len(clients_table(groups, [clients | {"measure": "accuracy"}]).notes) == 1


def test_mean_covers_the_rounds_every_seed_has(tmp_path):
    write_run(tmp_path, seed=0, rounds=5)
    short = write_run(tmp_path, seed=1, rounds=5)
    lines = (short / "records.jsonl").read_text().splitlines()
    (short / "records.jsonl").write_text("\n".join(lines[:3]) + "\n")
    group = draw_curves(gather([tmp_path]).groups)["groups"][0]
    assert group["mean"]["round"] == [1, 2, 3]
    assert [len(r["round"]) for r in group["runs"]] == [5, 3]


def test_long_curves_are_thinned_but_keep_last_best_and_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 10)
    path = write_run(tmp_path, rounds=200)
    rewrite(path, lambda r: r["personalised"].update(accuracy={37: 0.99, 111: 0.01}.get(r["round"], 0.5)))
    group = draw_curves(gather([tmp_path]).groups)["groups"][0]
    assert group["thinned"]
    assert {1, 37, 111, 200} <= set(group["runs"][0]["round"])
    assert len(group["runs"][0]["round"]) <= 13


def test_clients_are_sorted_and_compared_with_themselves_alone(tmp_path):
    set_scores(write_run(tmp_path, "fedavg", 0), {"a": 0.9, "b": 0.5, "c": 0.7})
    set_scores(write_run(tmp_path, "local", 0), {"a": 0.8, "b": 0.6, "c": 0.7})
    set_scores(write_run(tmp_path, "fedavg", 1), {"a": 0.9, "b": 0.5, "c": 0.7})      # no local run of this seed
    groups = gather([tmp_path]).groups
    local, first, second = client_scores(groups)
    assert local["local"] is None
    assert (first["names"], first["accuracy"], first["local"]) == (["b", "c", "a"], [0.5, 0.7, 0.9], [0.6, 0.7, 0.8])
    assert (first["worst"], first["harmed"], first["compared"]) == (0.5, 1, 3)      # b loses, c is level, a gains
    assert first["gain"] == pytest.approx((0.1 - 0.1 + 0.0) / 3)
    assert second["local"] is None
    rows = clients_table(groups, [local, first, second]).rows
    # worst tenth of three clients is one client; std over clients of .5 .7 .9 is sqrt(.08/3) = .163
    assert rows[1] == ["fedavg", "0.500", "0.500", "0.700", "0.163", "+0.000", "1 of 3"]


def test_clients_of_another_split_are_not_compared(tmp_path):
    write_run(tmp_path, "fedavg", 0)
    write_run(tmp_path, "local", 0, about={"hash": "another"})
    entry = next(e for e in client_scores(gather([tmp_path]).groups) if e["group"] == 1)
    assert entry["local"] is None


def test_table_has_spread_and_paired_difference(tmp_path):
    for seed, (a, b) in enumerate(((0.5, 0.6), (0.7, 0.9))):
        set_scores(write_run(tmp_path, "fedavg", seed), {"a": a})
        set_scores(write_run(tmp_path, "scaffold", seed), {"a": b})
    [table] = results_tables(gather([tmp_path]).groups)
    cells = dict(zip(table.header, table.rows[1]))
    # .6 and .9: mean .75, deviation .15·√2 = .212; differences .1 and .2: mean .15
    assert cells["personalised"] == "0.750 ± 0.212"
    assert cells["gain over fedavg"].startswith("+0.150 [")
    with pytest.raises(ConfigError, match=r"scafold.*scaffold"):
        results_tables(gather([tmp_path]).groups, "scafold")


def test_table_says_who_weighs_clients_otherwise(tmp_path):
    """Clients alone average nothing, under whatever label they stand."""
    write_run(tmp_path, "local")
    write_run(tmp_path, "local", lr=0.5)
    write_run(tmp_path, "scaffold", weights="uniform")
    said = lambda: [n.partition(";")[0] for t in results_tables(gather([tmp_path]).groups) for n in t.notes if n.startswith("Averages")]
    assert said() == []
    write_run(tmp_path, "fedavg")
    assert said() == ["Averages: every client weighs the same in scaffold, by its samples in fedavg"]


def test_runs_on_other_data_get_a_table_of_their_own(tmp_path):
    write_run(tmp_path, "fedavg", 0)
    write_run(tmp_path, "scaffold", 0)
    write_run(tmp_path, "scaffold", 0, split="dirichlet(alpha=0.5)")
    groups = gather([tmp_path]).groups
    assert [len(own) for own in comparable(groups)] in ([2, 1], [1, 2])
    assert len(results_tables(groups)) == 2


def test_split_is_counted_from_the_data_and_its_hash_checked(tmp_path):
    write_run(tmp_path / "good", "fedavg", 0, clients=4)
    [split], notes = picture_splits(gather([tmp_path / "good"]).runs)
    data = load("digits", "iid", 4, 0)
    assert notes == []
    assert split["counts"] == [[int((data.y[torch.cat([c.train, c.val, c.test])] == k).sum()) for k in range(10)] for c in data.clients]
    write_run(tmp_path / "bad", "fedavg", 0, about={"hash": "0123"})
    assert picture_splits(gather([tmp_path / "bad"]).runs)[1][0].startswith("No picture of split 0123: the data are divided differently")


def test_missing_data_leave_a_note(tmp_path):
    path = write_run(tmp_path)
    stored = json.loads((path / "config.json").read_text())
    stored["config"].update(data="cifar10", split="iid")
    stored["places"]["data_dir"] = str(tmp_path / "nowhere")
    (path / "config.json").write_text(json.dumps(stored))
    splits, notes = picture_splits(gather([tmp_path]).runs)
    assert splits == []
    assert "No picture of split" in notes[0]


def test_traces_are_read_as_measures_write_them():
    measures = {"cka": {"round": 3, "result": {"last": 0.9, "point": "logits", "kernel": "linear", "client": "c1",
                                               "trace": {"step": [0, 5, 10], "cka": [1.0, None, 0.9]}}},
                "kl": {"result": {"trace": {"step": [0, 5], "global||local": [0.0, 0.5], "local||global": [0.0, 0.25]}, "client": "c1"}},
                "mdl": {"result": {"trace": {"step": [0], "bits": [1.0]}}}}
    first, second, third = find_traces(measures)
    assert first == {"label": "linear CKA of logits with the received model", "client": "c1", "x": [0, 5, 10], "y": [1.0, None, 0.9]}
    assert (second["label"], second["y"]) == ("KL(global ‖ local), nats", [0.0, 0.5])
    assert third["y"] == [0.0, 0.25]


@pytest.mark.parametrize("odd", [{}, {"cka": []}, {"cka": {"result": None}}, {"cka": {"result": {"trace": {"step": "x"}}}},
                                 {"cka": {"result": {"trace": {"step": [1, 2], "cka": [1.0]}}}}, {"kl": {"left_out": "why"}}])
def test_other_forms_are_no_traces(odd):
    assert find_traces(odd) == []


def test_samples_for_maps_are_shared_among_clients():
    data = load("digits", "iid", 4, 0)
    chosen = choose_samples(data, 100, 0)
    assert [(i, len(r)) for i, r in chosen] == [(i, 25) for i in range(4)]
    assert all(set(r.tolist()) <= set(data.clients[i].test.tolist()) for i, r in chosen)
    assert len(choose_samples(load("digits", "iid", 30, 0), 100, 0)) == 10


def test_samples_for_maps_are_held_out_where_a_client_has_any():
    """Of three clients the first has test samples, the second none but validation samples, the third only training samples."""
    data = load("digits", "iid", 3, 0)
    a, b, c = data.clients
    whole = [ClientRows(a.name, a.train, a.val, a.test), ClientRows(b.name, b.train, b.test, b.test[:0]),
             ClientRows(c.name, c.train, c.val[:0], c.test[:0])]
    data = type(data)(data.name, data.x, data.y, data.classes, tuple(whole), data.test)
    chosen = [set(r.tolist()) for _, r in choose_samples(data, 60, 0)]
    assert [len(r) for r in chosen] == [20, 20, 20]
    assert chosen[0] <= set(a.test.tolist())
    assert chosen[1] <= set(b.test.tolist())                      # its validation samples now
    assert chosen[2] <= set(c.train.tolist())


def test_maps_are_repeatable_and_fill_the_square():
    features = torch.cat([rng.normal(rng.key(0, "a"), (30, 8)), rng.normal(rng.key(0, "b"), (30, 8)) + 9])
    one, two = (embed(features, rng.key(1, "m")) for _ in range(2))
    assert (one == two).all()
    assert one.min() >= 0
    assert one.max() <= 1
    assert max(one.max(0) - one.min(0)) == pytest.approx(1, abs=2e-3)
    near, far = abs(one[:30].mean(0) - one[30:].mean(0)), one[:30].std(0).max()
    assert near.max() > 2 * far                                   # two clouds stay two
    assert (embed(torch.ones(12, 3), rng.key(1, "m")) == 0.5).all()
    with pytest.raises(ConsilienceError, match="not finite"):
        embed(torch.full((12, 3), float("nan")), rng.key(1, "m"))
