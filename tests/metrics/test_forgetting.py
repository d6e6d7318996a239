"""LP over present and absent classes, with the guard for classes the global model never gets right."""

from __future__ import annotations

import pytest
import torch

from consilience import rng
from consilience.core.population import Population
from consilience.data.federated import ClientRows, FederatedData
from consilience.metrics.forgetting import local_preservation
from consilience.metrics.registry import make_measures
from consilience.metrics.subject import Subject
from consilience.parts.stack import parse_stack
from consilience.testing import tiny_federation, tiny_population


def test_present_and_absent_with_a_class_of_zero_accuracy():
    # present {0, 1}: 1.0/.8 = 1.25 and .5/.5 = 1 → 1.125. Absent {2, 3, 4}: .1/.4 = .25; class 3 has no ratio (x/0); class 4 untested
    before, after = [0.8, 0.5, 0.4, 0.0, None], [1.0, 0.5, 0.1, 0.3, None]
    got = local_preservation(before, after, {0, 1})
    assert got["present"] == {"lp": pytest.approx(1.125), "classes": 2, "skipped_zero": 0, "untested": 0}
    assert got["absent"] == {"lp": pytest.approx(0.25), "classes": 1, "skipped_zero": 1, "untested": 1}


def test_nothing_forgotten_is_one_and_nothing_known_is_none():
    same = [0.3, 0.9]
    assert local_preservation(same, same, {0})["present"]["lp"] == pytest.approx(1.0)
    assert local_preservation(same, same, {0, 1})["absent"] == {"lp": None, "classes": 0, "skipped_zero": 0, "untested": 0}
    assert local_preservation([0.0, 0.0], [1.0, 1.0], {0})["present"] == {"lp": None, "classes": 0, "skipped_zero": 1, "untested": 0}


def _subject(present: list[list[int]]) -> Subject:
    """Clients of three classes with nine training samples of each class they have, and twelve samples for all to be asked about."""
    y = torch.tensor([c for classes in present for c in classes for _ in range(9)] + [0, 1, 2] * 4)
    x = rng.normal(rng.key(0, "x"), (len(y), 1, 8, 8)) + y[:, None, None, None]
    ends = torch.tensor([9 * len(classes) for classes in present]).cumsum(0).tolist()
    names = tuple(f"site{chr(ord('d') - i)}" for i in range(len(present)))           # sited, sitec, siteb, …
    rows = [torch.arange(a, b) for a, b in zip([0, *ends], ends)]
    clients = tuple(ClientRows(n, r, r[:0], r[:0]) for n, r in zip(names, rows))
    data = FederatedData("three", x, y, 3, clients, torch.arange(ends[-1], len(y)))
    population = Population(x, y, tuple(rows), 3, tiny_population().transform, names)
    fed = tiny_federation(parse_stack("fedavg").parts, population=population)
    for _ in range(3):
        fed.round()
    return Subject(fed, data)


def test_the_client_with_half_of_the_classes_alone():
    """Classes per client 3, 2, 1 of three: 2 and 1 are equally near to 1.5, and the first of the two counts, whatever its name."""
    s = _subject([[0, 1, 2], [1, 2], [0]])
    every = make_measures(["forgetting"])[0].measure(s)
    half = make_measures(["forgetting(client='half')"])[0].measure(s)
    assert (half["client"], half["classes_present"]) == ("sitec", 2)
    own = every["per_client"]["sitec"]
    assert half["per_client"] == {"sitec": own}
    for group in ("present", "absent"):
        assert half[group]["lp"] == own[group]["lp"]
        assert half[group]["clients"] == (own[group]["lp"] is not None)
    # what footnote 8 compares methods by: the received model's accuracy, here of the one global model, on the same twelve samples
    logits = s.fed.program.network.forward(s.fed.model, s.data.x[s.data.test]).logits
    assert half["accuracy_received"] == pytest.approx(float((logits.argmax(1) == s.data.y[s.data.test]).double().mean()))
    assert half["accuracy_after"] == own["accuracy_after"]
    assert "client" not in every
    assert make_measures(["kl(client='half', looks=1)"])[0].measure(s)["client"] == "sitec"


def test_nearest_to_half_where_nobody_has_it():
    """Of three classes 1 is nearer to 1.5 than 3 are."""
    assert _subject([[0, 1, 2], [2]]).choose_client("half") == 1
    assert _subject([[0], [0, 1, 2]]).choose_client("half") == 0
