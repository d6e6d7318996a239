"""Who is scored where clients are many, and what is said before the first round."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass

import pytest
import torch

import consilience
from consilience import Correction, Part, tree
from consilience.data import from_arrays, load
from consilience.errors import ConsilienceError, DataError, NonFiniteError
from consilience.metrics.accuracy import score_personal
from consilience.parts import PARTS
from consilience.runs import scoring
from consilience.runs.config import RunConfig
from consilience.runs.measure import measure, table_of
from consilience.runs.reload import open_run
from consilience.runs.run import Listener, build_federation, load_data
from consilience.runs.scoring import cautions_of, only, score_round, scored_clients, warnings_of
from consilience.testing import state_of, tiny_federation, trial

SETTINGS = {"data": "synthetic(samples=400, classes=3, clients=20, features=6)", "rounds": 2, "lr": 0.1, "validation": 0.2,
            "participation": 5}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    heard = []

    class Ear(Listener):
        def noted(self, message):
            heard.append(message)
    result = consilience.run("dbe", out=folder, eval_clients=6, listener=Ear(), measure=("drift", "auroc"), **SETTINGS)
    return folder, result, heard


def test_the_same_clients_are_scored_in_every_round(drawn):
    folder, result, heard = drawn
    scored = [r for r in result.records if r["personalised"]]
    names = {frozenset(r[which]["per_client"]) for r in scored for which in ("global", "personalised")}
    assert len(names) == 1
    assert len(next(iter(names))) == 6
    assert all(r["eval_clients"] == {"scored": 6, "of": 20} for r in scored)
    assert scored[-1]["global"]["scored"] == "after aggregation, before local training, on 6 of 20 clients drawn by the seed"
    assert any("6 of 20 clients" in message for message in heard)
    assert json.loads((folder / "config.json").read_text())["config"]["eval_clients"] == 6


def test_a_drawn_client_has_the_score_it_would_have_among_all(drawn):
    _, result, _ = drawn
    everybody = consilience.run("dbe", eval_clients=0, **SETTINGS)
    assert "eval_clients" not in everybody.records[-1]
    for which in ("global", "personalised"):
        all_of_them, some = (r.records[-1][which]["per_client"] for r in (everybody, result))
        assert len(all_of_them) == 20
        assert some == {name: all_of_them[name] for name in some}
    assert all(torch.equal(t, result.global_model[k]) for k, t in everybody.global_model.items())


def test_all_are_scored_up_to_a_number(monkeypatch):
    config = RunConfig.make({**SETTINGS, "method": "fedavg"})
    data = load_data(config)
    fed = build_federation(config, data)
    assert scored_clients(fed, data, None) is None
    assert scored_clients(fed, data, 0) is None
    assert scored_clients(fed, data, 20) is None
    assert len(scored_clients(fed, data, 19)) == 19
    monkeypatch.setattr(scoring, "MOST_SCORED", 7)
    chosen = scored_clients(fed, data, None)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 7
    assert chosen == scored_clients(build_federation(config.replace(method="scaffold"), data), data, None)      # whatever the method
    assert chosen != scored_clients(build_federation(config.replace(seed=1), data), data, None)
    assert score_round(fed, data)["eval_clients"] == {"scored": 7, "of": 20}


@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("kept", [True, False])
def test_outputs_that_are_not_finite_end_a_run_and_name_the_clients(method, kept, tmp_path):
    """One step of 1e37 leaves finite parameters, whose outputs overflow: no loss, and the class of NaN is no answer."""
    with pytest.raises(NonFiniteError, match=r"after round 1 the loss on the samples of '0', '1', '2', '3' is not finite, scored after"):
        consilience.run(method, "synthetic(samples=400, classes=3, clients=4, features=6)", rounds=1, steps=1, lr=1e37,
                        model="mlp(hidden=(16,))", out=tmp_path if kept else None)


def test_measures_look_at_the_clients_that_are_scored(drawn):
    folder, result, _ = drawn
    names = set(result.records[-1]["personalised"]["per_client"])
    assert set(result.records[-1]["measures"]["drift"]["per_client"]) <= names
    later = measure(open_run(folder), ["drift", "accuracy"], keep=lambda path, entries: None)
    assert set(later["drift"]["result"]["per_client"]) <= names
    assert later["drift"]["result"]["per_client"].keys() == result.records[-1]["measures"]["drift"]["per_client"].keys()
    assert later["drift"]["eval_clients"] == {"scored": 6, "of": 20}
    assert "drift: of 6 of 20 clients, drawn by the seed." in table_of(later).notes
    data = open_run(folder).data
    assert only(data, None) is data
    few = only(data, [2, 5])
    assert [i for i, c in enumerate(few.clients) if len(c.train)] == [2, 5]
    assert few.table.names == data.table.names
    assert few.clients[5].test.tolist() == data.clients[5].test.tolist()


def test_own_models_are_scored_by_whose_they_are():
    config = RunConfig.make({**SETTINGS, "method": "fedper"})
    data = load_data(config)
    fed = build_federation(config, data)
    fed.round(range(20))
    rows = list(data.table.test)
    every = score_personal(fed, rows, data.table.names)
    some = score_personal(fed, [rows[i] for i in (3, 11)], ["a", "b"], [3, 11])
    assert some.values["loss"] == tuple(every.values["loss"][i] for i in (3, 11))


def test_warnings_of_many_sizes():
    """Sizes of training parts: 15 of 20 samples, but client 0 has 3 and client 1 has 4 of its own; batches of 5."""
    config = RunConfig.make({**SETTINGS, "method": "fedavg", "batch": 5, "validation": None})
    data = load_data(config)
    short = [own[: 3 if i == 0 else 4 if i == 1 else None] for i, own in enumerate(data.table.train)]
    data = consilience.data.FederatedData(data.name, data.x, data.y, 4, [c._replace(train=own) for c, own in zip(data.clients, short)],
                                          transform=data.transform, description=data.description)
    said = warnings_of(build_federation(config, data), data, 3)
    assert said[0].startswith("2 of 20 clients have fewer samples than a batch of 5 and will never train: 0, 1.")
    assert said[1] == "No client has training samples of class 3."


def test_clients_too_small_for_any_batch_are_not_told_to_keep_the_last_one():
    """Per-FedAvg cuts a batch in two: with last_batch=keep one sample is too few, and keeping it again is no cure."""
    keep = {"batch": 4, "last_batch": "keep"}
    assert _said([0, 1, 1, 1], sizes=(1, 3), **keep) == []
    assert _said([0, 1, 1, 1], sizes=(1, 3), **keep, method="perfedavg") == [
        "1 of 2 clients has fewer samples than the 2 that this method and model need in a batch and will never train: 0. "
        "Join such clients, or leave them out of the split."]
    with pytest.raises(DataError, match=r"Every client has fewer samples than the 2 that .* the largest has 1. Join such clients"):
        _said([0, 1], **keep, method="perfedavg")


def _said(y, class_names=(), sizes=None, **settings):
    """Warnings before a run on two clients with so many of the labels each, or half of them."""
    config = RunConfig.make({"method": "fedavg", "model": "mlp(hidden=4)", "batch": 2, **settings})
    y = torch.as_tensor(y)
    x, own = torch.zeros(len(y), 3), torch.arange(len(y)).split(sizes or len(y) // 2)
    rows = [consilience.data.federated.ClientRows(str(i), own[i], torch.arange(0), own[i]) for i in (0, 1)]
    data = consilience.data.FederatedData("mine", x, y, max(2, int(y.max()) + 1), rows, transform=lambda x, y, key: (x, y),
                                          description={"class_names": list(class_names)})
    return warnings_of(build_federation(config, data), data, config.run.rounds)


def test_labels_that_are_all_the_same_are_warned_of():
    assert [s.partition(",")[0] for s in _said([0] * 8)] == ["All training samples have the same label"]
    assert _said([0, 1] * 4) == []


def test_a_class_for_every_sample_is_warned_of():
    said = _said(list(range(80)))
    assert len(said) == 1
    assert "80 classes for 80 training samples" in said[0]
    assert _said(list(range(40)) * 2) == []           # 40 classes, two samples each


def test_classes_that_nobody_has_go_by_name_and_not_all_of_them():
    assert _said([0, 2] * 4, ["well", "ill", "dead"]) == ["No client has training samples of class ill."]
    assert _said([0, 30] * 4) == ["No client has training samples of class 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 19 more."]


def test_names_that_differ_in_capitals_alone_are_warned_of():
    said = _said([0, 1, 2, 0] * 2, ["Died", "died ", "survived"])
    assert said == ["The classes 'Died' and 'died ' differ in capitals or blanks alone. If they are the same, write them alike "
                    "in the data."]
    assert _said([0, 1] * 4, ["A", "a"]) == []          # letters, as FEMNIST's
    data = consilience.data.from_arrays(torch.rand(80, 3), [0, 1] * 40, ["North", "south", "north", "SOUTH"] * 20)
    with pytest.warns(consilience.ConsilienceWarning, match="The clients 'North' and 'north' .* alone .and 1 more such.. "):
        consilience.run("fedavg", data, model="mlp(hidden=4)", rounds=1, engine="sequential")


def test_words_that_differ_in_capitals_alone_are_warned_of(tmp_path):
    (tmp_path / "wards.csv").write_text("sex,label\n" + "F,0\nf,1\nM,0\n" * 20)
    with pytest.warns(consilience.ConsilienceWarning, match="The features 'sex=F' and 'sex=f' differ in capitals"):
        consilience.run("fedavg", f"table(path='{tmp_path / 'wards.csv'}', categories=sex)", split="iid", clients=2, rounds=1,
                        model="mlp(hidden=4)", engine="sequential")


@pytest.mark.parametrize(("shape", "said"), [((8, 8, 3), True), ((8, 8, 1), True), ((3, 8, 8), False), ((1, 8, 8), False),
                                             ((9, 128, 1), False), ((3, 3, 3), False)])
def test_images_with_their_channels_last_are_warned_of(shape, said):
    data = consilience.data.from_arrays(torch.rand(40, *shape), [0, 1] * 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        consilience.run("fedavg", data, split="iid", clients=2, model="mlp(hidden=4)", rounds=1, engine="sequential")
    assert any("Do the channels stand last?" in str(w.message) for w in caught) == said


def test_a_part_that_begins_after_the_last_round_is_warned_of():
    # FedFM matches after its first 20 rounds, in round 21
    assert "anchors first acts in round 21, and the run has 20" in _said([0, 1] * 4, method="fedfm", rounds=20)[0]
    assert _said([0, 1] * 4, method="fedfm", rounds=21) == []
    assert _said([0, 1] * 4, method="fedfm", rounds=1, settings={"anchors.start": 0}) == []


def test_columns_of_very_different_size_are_warned_of():
    def said(scale, **settings):
        x = torch.arange(80.0).view(40, 2).sin() * torch.tensor([1.0, scale])
        data = load(from_arrays(x.numpy(), [0, 1] * 20, [0, 1] * 20), **settings)
        config = RunConfig.make({"method": "fedavg", "model": "mlp(hidden=4)", "batch": 2})
        return [s.partition(":")[0] for s in warnings_of(build_federation(config, data), data, 3)]
    assert said(200.0) == ["The features differ in size"]
    assert said(5.0) == said(200.0, transform="standardise") == []


class Probabilities(torch.nn.Module):
    """Ends as many a model in textbooks, by no layer's name; and draws numbers in evaluation too."""

    end = staticmethod(lambda out: out.exp() / out.exp().sum(1, keepdim=True))

    def __init__(self, sample, classes):
        super().__init__()
        self.drop, self.head = torch.nn.Dropout(0.3), torch.nn.Linear(sample[0], classes)

    def forward(self, x):
        noise = 0 if self.training else 0 * torch.rand(1)
        return self.end(self.head(self.drop(x)) + noise)


OWN = SETTINGS | {"model": Probabilities, "taps": "head=head"}


@pytest.mark.parametrize(("end", "precision", "warned"), [
    (None, "float32", True), (None, "bfloat16", True), (lambda out: out.log_softmax(1), "float32", False), (torch.relu, "float32", False)])
def test_outputs_that_are_probabilities_are_warned_of(end, precision, warned, monkeypatch):
    """Cross-entropy takes the softmax of a softmax without a word; of its logarithm that changes nothing."""
    if end is not None:
        monkeypatch.setattr(Probabilities, "end", staticmethod(end))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        consilience.run("fedavg", **OWN | {"rounds": 1, "precision": precision})
    assert len([w for w in said if "as after a softmax" in str(w.message)]) == warned


def test_asking_a_model_what_it_returns_changes_no_number(monkeypatch):
    def numbers():
        torch.manual_seed(3)
        result = consilience.run("dbe", listener=Listener(), **OWN)
        return [{k: v for k, v in r.items() if k != "measured"} for r in result.records], torch.get_rng_state()
    asked = numbers()
    monkeypatch.setattr(scoring, "_odd_outputs", lambda fed, data: [])
    unasked = numbers()
    assert asked[0] == unasked[0]
    assert torch.equal(asked[1], unasked[1])


@pytest.mark.parametrize("map_data", [False, True])
def test_columns_are_named_in_that_warning_where_they_have_names(tmp_path, map_data):
    """Ages of 40 to 79, doses of 0.1 to 4: mean squares are 60.6² and 2.35²."""
    rows = [f"{40 + i},{(i + 1) / 10},{i % 2},{i % 4}" for i in range(40)]
    (tmp_path / "wards.csv").write_text("\n".join(["age,dose,died,ward", *rows]))
    data = load("table(path='wards.csv', label=died, client=ward)", train=1.0, data_dir=tmp_path, map_data=map_data)
    config = RunConfig.make({"method": "fedavg", "model": "mlp(hidden=4)", "batch": 2})
    said = warnings_of(build_federation(config, data), data, 3)
    assert any("The features differ in size: 'age' is about 60.6, 'dose' about 2.35. Such columns" in line for line in said), said


def test_noise_is_named_where_it_is_the_likely_cause_of_outputs_that_are_not_finite():
    """Noise of 1e37 beside changes of norm 1: parameters stay finite, outputs do not, and no learning rate would help."""
    with pytest.raises(NonFiniteError, match=r"after round 1 the loss .* The likely cause: dp adds noise .* If that is not it"):
        consilience.run("fedavg+dp", "synthetic(samples=400, classes=3, clients=4, features=6)", rounds=1, steps=1,
                        model="mlp(hidden=(16,))", settings={"dp.noise": 1e37})


@dataclass(frozen=True)
class Pull(Part):
    """FedProx as the README has it, which refuses nothing."""

    mu: float = 0.1
    name = "pull"

    def loss(self, v):
        return 0.5 * self.mu * tree.sq_dist(tree.pick(v.params, v.travelling), v.received["params"])


@dataclass(frozen=True)
class Declared(Part):
    """The same pull, declared."""

    name = "declared"

    def correction(self, v):
        return Correction(strength=0.1, target=tree.pick(v.received["params"], v.travelling))


@dataclass(frozen=True)
class Corrected(Pull):
    """The same pull added to the gradient, of parameters that need not travel."""

    name = "corrected"

    def grad(self, v, g):
        return {k: t + self.mu * (v.params[k] - v.received["params"][k]) for k, t in g.items()}


@pytest.mark.parametrize(("parts", "said"), [
    ([Pull(), PARTS["local"]()], ["pull"]), ([Pull(), PARTS["fomo"]()], ["pull"]), ([Pull(), PARTS["local"](), PARTS["proto"]()], ["pull"]),
    ([Pull()], []), ([Pull(), PARTS["per"]()], []), ([Pull(), PARTS["rep"]()], []), ([Corrected(), PARTS["local"]()], []),
    ([Declared(), PARTS["local"]()], ["declared"]), ([Declared()], []), ([Declared(), PARTS["rep"]()], [])])
def test_a_term_that_changes_nothing_where_nothing_travels_is_warned_of(parts, said):
    fed = tiny_federation(parts)
    before = state_of(fed)
    warned = cautions_of(fed, 3)
    assert [line.partition(" adds to the loss what depends on nothing that is trained")[0] for line in warned] == said
    after = state_of(fed)
    assert [k for k in before if not torch.equal(before[k], after[k])] == []


class Chooser(Part):
    name = "chooser"

    def choose(self, s, drawn):
        return drawn


def test_a_part_that_is_never_asked_whom_to_choose_is_warned_of():
    """All clients take part by default, and its numbers would be FedAvg's under its name."""
    said = cautions_of(tiny_federation([Chooser()]), 3)
    assert said == ["chooser chooses the clients of a round, and all 4 take part in every round: nobody asks it. Set participation."]
    assert cautions_of(tiny_federation([Chooser()], participation=3), 3) == []


@pytest.mark.parametrize("alone", ["local", "apple", "fomo"])
def test_no_part_of_ours_is_said_to_change_nothing(alone):
    """They refuse what they would be idle beside."""
    for name in sorted(PARTS.keys() - {alone}):
        try:
            fed = tiny_federation([trial(PARTS[name]), trial(PARTS[alone])])
        except ConsilienceError:
            continue
        assert cautions_of(fed, 10**6) == [], name
