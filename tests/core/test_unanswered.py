"""Clients that do not answer: the round goes on with those who did, as if the others had failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from consilience.core.engine import ClientTask, Work
from consilience.core.federation import Federation
from consilience.engines.sequential import Sequential
from consilience.parts import find_part
from consilience.testing import differences, tiny_federation, trial


class Deaf(Sequential):
    """Some clients answer nothing, from some stage on."""

    silent: frozenset[int] = frozenset()
    also_before_training = False

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        for work in works:
            yield None if work.number in self.silent and work.kind == "round" else next(iter(super().run([work])))

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]:
        for number, own in zip(numbers, given):
            yield None if self.also_before_training and number in self.silent else task(fed, number, common, own)


def _pair(parts: list[str], before: bool) -> tuple[Federation, Federation]:
    """One federation where client 1 is silent, and one where it is not selected."""
    class Engine(Deaf):
        silent, also_before_training = frozenset({1}), before
    made = [trial(find_part(name)) for name in parts]
    deaf, other = tiny_federation(made, engine=Engine), tiny_federation(made)
    deaf.prepared = other.prepared = True
    return deaf, other


@pytest.mark.parametrize("parts", [[], ["scaffold"], ["prbm"], ["dro"], ["nova"]], ids=lambda p: "+".join(p) or "fedavg")
def test_a_client_silent_in_training_counts_as_lost(parts: list[str]) -> None:
    deaf, other = _pair(parts, before=False)
    report = deaf.round()
    other.round([0, 2, 3])
    assert report.lost == [1]
    assert sorted(report.losses) == [0, 3]
    assert not differences(deaf, other, only=lambda path: not path.startswith("clients/1/"))


@pytest.mark.parametrize("parts", [["anchors"], ["debias"], ["debias", "anchors"]], ids="+".join)
def test_a_round_begins_again_without_one_silent_in_the_survey(parts: list[str]) -> None:
    """FedBR shares its pseudo-data out among the cohort: without a new survey rows would be missing."""
    deaf, other = _pair(parts, before=True)
    report = deaf.round()
    other.round([0, 2, 3])
    assert report.lost == [1]
    assert not differences(deaf, other, only=lambda path: not path.startswith("clients/1/"))


def test_a_client_of_the_round_before_that_is_silent_is_not_asked_for_ever() -> None:
    """Anchors of the round before are made by its clients; one of them no longer answers."""
    class Engine(Deaf):
        silent, also_before_training = frozenset({1}), True
    fed = tiny_federation([replace(trial(find_part("anchors")), clients="previous")], engine=Engine)
    fed.round()
    assert fed.round().lost == [1]


def test_preparation_goes_on_without_the_silent() -> None:
    class Engine(Deaf):
        silent, also_before_training = frozenset({0, 1}), True
    fed = tiny_federation([trial(find_part("mr"))], engine=Engine)
    report = fed.prepare()
    assert fed.prepared
    assert report.lost == [0, 1]
    assert report.cohort == [0, 1, 2, 3]


def test_nobody_answers() -> None:
    class Engine(Deaf):
        silent = frozenset(range(4))
    fed = tiny_federation([], engine=Engine)
    before = {k: v.clone() for k, v in fed.model["params"].items()}
    report = fed.round()
    assert report.lost == [0, 1, 3]
    assert report.idle == [2]
    assert not report.exchanged
    assert all(bool((before[k] == v).all()) for k, v in fed.model["params"].items())
