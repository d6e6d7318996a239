"""What measures ask of a run: rows, models, clients; and the names measures go by."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.task import image_dice, task_named
from consilience.data.federated import ClientRows, FederatedData
from consilience.engines import Sequential
from consilience.errors import ConfigError
from consilience.metrics import registry
from consilience.metrics.classification import class_accuracy
from consilience.metrics.registry import Measure, as_plain, describe_measures, installed_measures, make_measures, register
from consilience.metrics.subject import Reference, Subject
from consilience.options import option
from consilience.parts.stack import parse_stack
from consilience.runs.measure import check_measures, measures_of_round
from consilience.testing import state_of, tiny_federation, tiny_population


def tiny_subject(method: str = "fedavg", *, test: bool = True, global_test: int = 0, rounds: int = 2) -> Subject:
    """The tiny population with the last third of each client's rows for testing."""
    whole = tiny_population((36, 27, 6, 60))
    clients = []
    for name, rows in zip(whole.names, whole.rows):
        cut = len(rows) * 2 // 3
        clients.append(ClientRows(name, rows[:cut], rows[:0], rows[cut:] if test else rows[:0]))
    data = FederatedData("tiny", whole.x, whole.y, 3, tuple(clients), torch.arange(global_test))
    population = Population(whole.x, whole.y, tuple(c.train for c in clients), 3, whole.transform, whole.names, whole.proxy)
    fed = tiny_federation(parse_stack(method).parts, population=population)
    for _ in range(rounds):
        fed.round()
    return Subject(fed, data)


def test_answers_of_the_global_model_are_its_logits():
    s = tiny_subject()
    answers = s.answers("global", "before", "test")
    assert len(answers) == 12 + 9 + 2 + 20
    assert answers.owner.bincount().tolist() == [12, 9, 2, 20]
    rows = s.data.clients[1].test
    logits = s.fed.program.network.forward(s.fed.model, s.data.x[rows]).logits
    assert torch.allclose(answers.of(1).logits, logits, atol=1e-6)
    assert torch.equal(answers.of(1).y, s.data.y[rows])
    assert s.answers("global", "before", "test") is answers                    # gathered once


def test_answers_after_local_training_are_of_the_trained_models():
    s = tiny_subject("dbe")
    for model, taps in (("global", False), ("personalised", True)):
        outcome = s.trained.outcomes[0]
        x = s.data.x[s.data.clients[0].test]
        expected = s.fed.look(0, outcome.state, outcome.model, x, False, taps).logits
        assert torch.allclose(s.answers(model, "after", "test").of(0).logits, expected, atol=1e-6)
    # client 2 (four training rows) makes no step: it holds what it received
    x = s.data.x[s.data.clients[2].test]
    expected = s.fed.look(2, s.fed.client(2), s.fed.model, x, False, False).logits
    assert torch.allclose(s.answers("global", "after", "test").of(2).logits, expected, atol=1e-6)


def test_rows_fall_back_to_the_global_test_set_and_say_so():
    s = tiny_subject(test=False, global_test=10)
    assert s.choose_rows("auto") == "global"
    assert s.choose_rows("test") == "test"
    assert s.no_rows("test") == "no client has test samples. Set rows=global"
    assert len(s.answers("global", "before", "global")) == 10                  # one model, asked once
    assert len(s.answers("global", "after", "global")) == 40                   # a model per client
    assert tiny_subject(global_test=10).choose_rows("auto") == "test"
    assert tiny_subject(global_test=10).choose_rows("auto", first="global") == "global"


def test_the_client_chosen_covers_half_of_the_classes():
    s = tiny_subject(rounds=0)
    y = s.data.y.clone()
    y[s.data.clients[1].train] = torch.arange(len(s.data.clients[1].train)) % 2       # 2 of 3 classes; others have all three
    s.data = FederatedData("tiny", s.data.x, y, 3, s.data.clients)
    assert s.choose_client("") == 1
    assert s.choose_client("client3") == 3
    with pytest.raises(ConfigError, match=r"no client 'client9'.*Did you mean"):
        s.choose_client("client9")
    with pytest.raises(ConfigError, match="never trains"):
        s.choose_client("client2")


def test_forgetting_and_local_models_by_another_road():
    s = tiny_subject(global_test=40)
    got = make_measures(["forgetting"])[0].measure(s)
    x, y = s.data.x[:40], s.data.y[:40]
    predicted = lambda model: s.fed.program.network.forward(model, x).logits.argmax(1)
    before, after = (class_accuracy(predicted(m), y, 3) for m in (s.fed.model, s.trained.outcomes[0].model))
    ratios = [a / b for a, b in zip(after, before) if b]
    assert got["per_client"]["client0"]["present"]["lp"] == pytest.approx(sum(ratios) / len(ratios))
    assert got["present"]["skipped_zero"] == 3 * sum(b == 0 for b in before)             # every client owns every class
    assert got["absent"]["lp"] is None
    local = make_measures(["local_models"])[0].measure(s)
    right = [float((predicted(o.model) == y).double().mean()) for o in s.trained.outcomes.values()]
    assert local["before_aggregation"] == pytest.approx(sum(right) / 3)
    assert local["after_aggregation"] == pytest.approx(float((predicted(s.trained.aggregated) == y).double().mean()))
    one = make_measures(["forgetting(client='client3')"])[0].measure(s)
    assert list(one["per_client"]) == ["client3"]


def test_paths_start_at_the_received_model_and_end_at_the_trained_one():
    s = tiny_subject()
    cka, kl = (m.measure(s) for m in make_measures(["cka(client='client0')", "kl(client='client0', looks=3)"]))
    assert cka["trace"]["step"][0] == 0
    assert cka["trace"]["cka"][0] == pytest.approx(1.0)
    assert 0 < cka["last"] < 1
    assert kl["trace"]["global||local"][0] == kl["trace"]["local||global"][0] == 0.0
    assert kl["last"] == kl["trace"]["global||local"][-1] > 0
    assert len(kl["trace"]["step"]) == 4                                       # the start and three looks
    rows = torch.cat([c.test for c in s.data.clients])
    end = s.fed.program.network.forward(s.trained.outcomes[0].model, s.data.x[rows]).logits.double().log_softmax(1)
    start = s.fed.program.network.forward(s.fed.model, s.data.x[rows]).logits.double().log_softmax(1)
    assert kl["last"] == pytest.approx(float((start.exp() * (start - end)).sum(1).mean()), rel=1e-5)
    other = make_measures(["kl(client='client0', direction='local||global')"])[0].measure(s)
    assert other["last"] == pytest.approx(float((end.exp() * (end - start)).sum(1).mean()), rel=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "dbe", "local", "fedbn", "fedper", "union", "ditto"])
def test_every_measure_works_or_says_why_not_and_changes_nothing(method):
    s = tiny_subject(method, global_test=30)
    before = state_of(s.fed)
    records = [{"round": 1, "cohort": ["client0"], "idle": [], "lost": [], "bytes_up": 1, "bytes_down": 1,
                "measured": {"seconds": 1.0}, "global": None, "personalised": {"accuracy": 0.5, "mean": 0.5, "worst": 0.5}}]
    names = [n for n in installed_measures() if n != "mdl"]
    got = measures_of_round(s.fed, s.data, [*names, "mdl(steps=2, seeds=1, points=2, hidden=4)"], records)
    json.dumps(got, allow_nan=False)
    left = {name for name, result in got.items() if "left_out" in result}
    assert left == {"dice", "harmed", "rounds_to", "shifted_test"}
    after = state_of(s.fed)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[path], before[path]) for path in before)
    without_global = method in ("local", "fedper", "fedbn")
    assert ("global" in got["accuracy"]) is not without_global
    assert ("personalised" in got["accuracy"]) is (method not in ("fedavg", "union"))


def test_dice_with_and_without_background():
    x = rng.normal(rng.key(3, "images"), (24, 1, 4, 4))
    rows = torch.arange(24).split(12)
    y = (x[:, 0] > 0).long()
    clients = tuple(ClientRows(f"site{i}", r[:8], r[:0], r[8:]) for i, r in enumerate(rows))
    data = FederatedData("masks", x, y, 2, clients, task="segmentation")
    population = Population(x, y, tuple(c.train for c in clients), 2, data.transform, tuple(c.name for c in clients),
                            task=task_named("segmentation"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = torch.nn.Sequential(OrderedDict(body=torch.nn.Conv2d(1, 4, 1), head=torch.nn.Conv2d(4, 2, 1)))
    fed = Federation(net, Layout(head="head"), Method(()), population, Policy(batch=4, lr=0.1), Sequential)
    got = measures_of_round(fed, data, ["dice", "accuracy"])
    per_site = []
    for client in clients:
        predicted = fed.program.network.forward(fed.model, x[client.test]).logits.argmax(1)
        by_class = image_dice(predicted, y[client.test], 2).mean(0)
        per_site.append([float(by_class.mean()), float(by_class[1])])
    assert got["dice"]["global"]["with_background"]["per_client"] == pytest.approx({"site0": per_site[0][0], "site1": per_site[1][0]})
    assert got["dice"]["global"]["foreground"]["client_mean"] == pytest.approx((per_site[0][1] + per_site[1][1]) / 2)
    assert got["dice"]["global"]["with_background"]["pooled"] == pytest.approx((per_site[0][0] + per_site[1][0]) / 2)    # four images each
    assert 0 < got["accuracy"]["global"]["pooled"] < 1
    assert "masks" in measures_of_round(fed, data, ["auroc"])["auroc"]["left_out"]


def test_measures_that_can_never_be_taken_are_refused_before_a_run():
    s = tiny_subject(rounds=0)
    check_measures(s.fed, s.data, ["auroc", "selection", "cka"])
    with pytest.raises(ConfigError, match="'dice' cannot be taken here: it is defined for masks"):
        check_measures(s.fed, s.data, ["auroc", "dice"])
    with pytest.raises(ConfigError, match="--reference"):
        check_measures(s.fed, s.data, ["harmed"])


def test_names_and_options():
    mdl, = make_measures(["mdl(steps=7)"], {"mdl.seeds": "2"})
    assert (mdl.steps, mdl.seeds, mdl.lr) == (7, 2, 1e-4)
    for names, options, words in ((["aurok"], {}, "Did you mean 'auroc'"), (["mdl"], {"mdl.step": 3}, "Did you mean 'steps'"),
                                  (["mdl"], {"mdl.steps": 0}, "at least 1"), (["mdl"], {"cka.looks": 3}, "not among those asked for"),
                                  (["mdl(7)"], {}, "need names"), (["kl"], {"kl.direction": "up"}, "must be one of")):
        with pytest.raises(ConfigError, match=words):
            make_measures(names, options)
    rows = describe_measures()
    assert all(r["meaning"] and r["formula"] for r in rows)
    assert next(r for r in rows if r["name"] == "mdl")["options"][0]["name"] == "n"


def test_a_measure_of_ones_own_is_one_small_class(monkeypatch):
    monkeypatch.setattr(registry, "MEASURES", dict(registry.MEASURES))

    @register
    @dataclass(frozen=True)
    class Power(Measure):
        """Clients to a power."""

        name = "power"
        exponent: int = option(2, "the power", low=1)

        def measure(self, s: Subject) -> dict[str, Any]:
            return {"answer": s.data.population ** self.exponent}

    s = tiny_subject(rounds=0)
    assert measures_of_round(s.fed, s.data, ["power(exponent=3)"]) == {"power": {"answer": 64}}
    with pytest.raises(ConfigError, match="frozen dataclass"):
        register(type("Loose", (), {"name": "loose"}))

    @dataclass(frozen=True)
    class Clash(Measure):
        name = "power"
    with pytest.raises(ConfigError, match="has already"):
        register(Clash)


def test_plain_values():
    given = {"a": torch.tensor(2.5), "b": (1, float("nan")), "c": {1: float("inf")}}
    assert as_plain(given) == {"a": 2.5, "b": [1, None], "c": {"1": None}}


CURVE = [{"round": r, "global": {"accuracy": a, "mean": a, "worst": a / 2}, "validation": {"accuracy": v},
          "personalised": {"accuracy": a, "mean": a, "worst": a / 2}} for r, a, v in ((2, .4, .3), (4, .7, .5), (6, .6, .6), (8, .5, .6))]


def with_records(reference: list | None = None) -> Subject:
    s = tiny_subject(rounds=0)
    s.records = CURVE
    s.reference = Reference("fedavg", 0, s.data.split_hash(), reference) if reference else None
    return s


def test_selection_labels_every_choice():
    got = make_measures(["selection(best=2)"])[0].measure(with_records())["personalised"]["accuracy"]
    # validation is best in rounds 6 and 8: the earlier one counts
    assert got == {"last": .5, "last_round": 8, "best_by_validation": .6, "best_by_validation_round": 6, "best_by_test": .7,
                   "best_by_test_round": 4, "mean_of_best_2": pytest.approx(.65)}


def test_rounds_to_prints_a_dash_where_it_is_never_reached():
    s = with_records([{"round": r, "personalised": {"accuracy": a}} for r, a in ((1, .1), (12, .55), (20, .45))])
    got = make_measures(["rounds_to(at=(0.5, 0.9))"])[0].measure(s)
    assert got["thresholds"] == [{"threshold": .5, "round": 4, "reference_round": 12, "speed_up": 3.0},
                                 {"threshold": .9, "round": "-", "reference_round": "-", "speed_up": None}]
    default = make_measures(["rounds_to"])[0].measure(s)["thresholds"]
    assert default == [{"threshold": .45, "round": 4, "reference_round": 12, "speed_up": 3.0}]     # the reference's last score
    assert "needs thresholds" in make_measures(["rounds_to"])[0].why_not(with_records())


def test_harmed_wants_the_same_split():
    s = with_records([{"round": 1, "personalised": {"accuracy": .1, "per_client": {"client0": .1}}}])
    assert "no score per client" in make_measures(["harmed"])[0].why_not(s)
    s.reference = Reference("local", 0, "another", s.reference.records)
    assert "divides its data differently" in make_measures(["harmed"])[0].why_not(s)


def test_the_class_that_matters_is_said_and_can_be_chosen():
    s = tiny_subject()                                     # three classes without names
    (by_class,) = make_measures(["sensitivity(positive=2)"])
    (each,) = make_measures(["sensitivity"])
    answers = s.answers("global", "before", "test")
    found = class_accuracy(answers.predicted, answers.y, 3)
    scores = by_class.measure(s)["global"]
    assert scores["pooled"] == pytest.approx(found[2])
    assert scores["scored"].endswith("; positive is class 2")
    assert each.measure(s)["global"]["pooled"] == pytest.approx(sum(f for f in found if f is not None) / sum(f is not None for f in found))
    assert each.measure(s)["global"]["scored"].endswith("mean over the classes that occur")
    (wrong,) = make_measures(["f1(positive=died)"])
    assert wrong.why_not(s) == "there is no class 'died' among 0, 1, 2"
