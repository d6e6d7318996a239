"""Pooled training equals one client with all the data."""

from __future__ import annotations

import pytest
import torch

from consilience.errors import RefusedCombination
from consilience.parts.dann import Dann
from consilience.parts.local import Local
from consilience.parts.per import Per
from consilience.parts.union import Union
from consilience.testing import differences, run_tiny, tiny_federation


def test_pooled_is_one_client_with_everything():
    pooled = run_tiny([Union()])            # 24 + 17 + 5 + 40, the same rows in the same order
    population = pooled.population
    assert len(population.rows) == 4
    single = tiny_federation(population=type(population)(population.x, population.y, (torch.arange(86),), 3, population.transform))
    for _ in range(2):
        single.round()
    assert not differences(pooled, single)


def test_samples_of_small_clients_count_too():
    fed = tiny_federation([Union()])
    assert fed.size == 1
    assert sorted(fed.samples.rows[0].train.tolist()) == list(range(86))
    report = fed.round()
    assert report.cohort == [0]
    assert report.idle == []


@pytest.mark.parametrize("part", [Per(), Local(), Dann(hidden=4)])
def test_refuses_what_needs_several_clients(part):
    with pytest.raises(RefusedCombination, match="union"):
        tiny_federation([Union(), part])
