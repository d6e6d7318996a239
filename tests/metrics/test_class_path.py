"""Accuracy on the classes a client has and lacks, along its local training."""

from __future__ import annotations

import pytest

from consilience.metrics.measures.class_path import ClassPath
from consilience.metrics.measures.local import Forgetting
from consilience.metrics.subject import Subject
from consilience.runs.config import RunConfig
from consilience.runs.run import build_federation, load_data


@pytest.fixture(scope="module")
def subject() -> Subject:
    config = RunConfig.make({"method": "fedavg", "data": "digits", "clients": 6, "lr": 0.1, "epochs": 3})
    data = load_data(config)
    fed = build_federation(config, data)
    for _ in range(2):
        fed.round()
    return Subject(fed, data)


def test_both_ends_agree_with_the_received_and_the_trained_model(subject):
    """All test samples are looked at, so the ends are the shares of right answers that class accuracies give."""
    s = subject
    owner = s.choose_client("")
    measured = ClassPath(samples=10_000, client=s.names[owner]).measure(s)
    y = s.data.y[s.everything("test")]
    present = s.present(owner)
    start = Forgetting().ask(s, s.fed.model)
    end = Forgetting().ask(s, s.trained.outcomes[owner].model, owner)
    for group, inside in (("present", True), ("absent", False)):
        for name, answers in (("received", start), ("last", end)):
            own = [p == t for p, t in zip(answers.predicted.tolist(), answers.y.tolist()) if (t in present) == inside]
            assert measured[group][name] == pytest.approx(sum(own) / len(own))
    assert 0 < len(present) < s.data.classes
    assert measured["samples"] == len(y)
    assert measured["trace"]["step"][0] == 0
    assert len(measured["trace"]["absent"]) == len(measured["trace"]["step"])


def test_local_training_forgets_classes_the_client_lacks(subject):
    measured = ClassPath(samples=10_000).measure(subject)
    assert measured["absent"]["last"] < measured["present"]["last"]
