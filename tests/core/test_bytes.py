"""Bytes up and down, counted by hand.

TinyNet has 40 + 8 + 780 + 24 + 156 + 39 = 1047 parameters (convolution, norm, linear, norm, header, head), 32 running statistics
and two batch counters of 8 bytes: 4·1079 + 16 = 4332 bytes. Three of four clients can fill a batch.
"""

from __future__ import annotations

import pytest
import torch
from core_parts import Plain, federation

from consilience import tree
from consilience.parts.anchors import Anchors
from consilience.parts.babu import Babu
from consilience.parts.bn import Bn
from consilience.parts.cm import Cm
from consilience.parts.debias import Debias
from consilience.parts.gen import Gen
from consilience.parts.mix import Mix
from consilience.parts.mr import Mr
from consilience.parts.nova import Nova
from consilience.parts.per import Per
from consilience.parts.rep import Rep
from consilience.parts.scaffold import Scaffold
from consilience.testing import tiny_federation

MODEL, PARAMS, HEAD, NORM = 4332, 4 * 1047, 4 * 39, 4 * 64 + 16


def traffic(parts=(), rounds=2, **policy):
    fed = tiny_federation(parts, **policy)
    return [(r.bytes_down, r.bytes_up) for r in (fed.round() for _ in range(rounds))]


def test_size_of_the_model():
    fed = tiny_federation()
    assert tree.count_bytes(fed.model) == MODEL
    assert tree.count_bytes(fed.model["params"]) == PARAMS


def test_fedavg():
    assert traffic() == [(3 * MODEL, 3 * MODEL)] * 2


def test_scaffold_sends_everything_twice():
    assert traffic([Scaffold()]) == [(3 * (MODEL + PARAMS), 3 * (MODEL + PARAMS))] * 2


def test_fedcm_sends_its_direction_down_and_up():
    # the direction down with its weight of 4 bytes, the direction up
    assert traffic([Cm()]) == [(3 * (MODEL + PARAMS + 4), 3 * (MODEL + PARAMS))] * 2


def test_fednova_sends_one_number_up():
    assert traffic([Nova()]) == [(3 * MODEL, 3 * (MODEL + 4))] * 2


def test_local_heads_never_travel():
    assert traffic([Per()]) == [(3 * (MODEL - HEAD), 3 * (MODEL - HEAD))] * 2
    assert traffic([Rep()]) == [(3 * (MODEL - HEAD), 3 * (MODEL - HEAD))] * 2


def test_normalisation_that_stays():
    # 2·(4 + 12) scales and shifts, as many statistics, two counters
    assert traffic([Bn()]) == [(3 * (MODEL - NORM), 3 * (MODEL - NORM))] * 2
    statistics = 4 * 32 + 16
    assert traffic(batchnorm="params") == [(3 * (MODEL - statistics), 3 * (MODEL - statistics))] * 2


def test_fedbabus_frozen_head_is_sent_once():
    body = MODEL - HEAD
    assert traffic([Babu()], rounds=3) == [(3 * MODEL, 3 * body), (3 * body, 3 * body), (3 * body, 3 * body)]


def test_a_frozen_head_reaches_a_late_client_too():
    fed = tiny_federation([Babu()])
    assert [fed.round([0]).bytes_down, fed.round([0, 1]).bytes_down, fed.round([1]).bytes_down] == [
        MODEL, (MODEL - HEAD) + MODEL, MODEL - HEAD]


def test_mrs_mean_is_sent_once():
    fed = tiny_federation([Mr()])
    mean = 4 * 12
    prepared = fed.prepare()
    # All four clients, the small one too, get the model and what is shared at its start; each sends a sum and a count.
    assert (prepared.bytes_down, prepared.bytes_up) == (4 * (MODEL + mean), 4 * (mean + 4))
    assert fed.round([0, 1]).bytes_down == 2 * (MODEL + mean)
    assert fed.round([0, 1]).bytes_down == 2 * MODEL
    assert fed.round([1, 3]).bytes_down == 2 * MODEL + mean        # client 3 hears the mean for the first time
    assert fed.round([0, 1, 3]).bytes_down == 3 * MODEL


def test_generator_down_each_round_label_counts_once():
    fed = tiny_federation([Gen(noise=2, hidden=4, steps=1)])
    generator = 4 * (4 * 5 + 4 + 4 + 4 + 12 * 4 + 12)
    counts = 4 * 3
    prepared = fed.prepare()
    assert (prepared.bytes_down, prepared.bytes_up) == (4 * (MODEL + generator + counts), 4 * counts)
    # round one: the counts have changed, the untrained generator has not; from round two the trained generator
    assert [fed.round().bytes_down, fed.round().bytes_down] == [3 * (MODEL + counts), 3 * (MODEL + generator)]


def test_surveys_are_counted():
    fed = tiny_federation([Anchors()])
    report = fed.round([0])
    part = fed.method.parts[0]
    shared = tree.count_bytes(fed.shared["anchors"])
    assert part.name == "anchors"
    assert report.bytes_down == MODEL + shared
    assert report.bytes_up > MODEL                                 # model, class means and counts


@pytest.mark.parametrize("part", [Debias(projection="none", group=2), Mix(refresh="round", pool=6, group=2)], ids=lambda p: p.name)
def test_nothing_is_sent_to_ask_for_nothing(part):
    """Pseudo-data of every round are asked for in the round: there is nothing to prepare, and no client gets the model for it."""
    fed = tiny_federation([part])
    prepared = fed.prepare()
    assert (prepared.cohort, prepared.bytes_down, prepared.bytes_up) == ([], 0, 0)
    samples = tree.count_bytes(fed.shared[part.name])
    assert [(r.bytes_down, r.bytes_up) for r in (fed.round(), fed.round())] == [(3 * (MODEL + samples), 3 * MODEL + samples)] * 2


@pytest.mark.parametrize("part", [Debias(projection="none", group=2, refresh="once"), Mix(pool=6, group=2)], ids=lambda p: p.name)
def test_samples_that_are_asked_for_once_are_counted_once(part):
    fed = tiny_federation([part])
    samples = tree.count_bytes(fed.shared[part.name])
    prepared = fed.prepare()
    assert (prepared.bytes_down, prepared.bytes_up) == (4 * (MODEL + samples), samples)
    assert [(r.bytes_down, r.bytes_up) for r in (fed.round(), fed.round())] == [(3 * (MODEL + samples), 3 * MODEL), (3 * MODEL, 3 * MODEL)]


def test_only_what_a_dtype_takes():
    fed = federation(Plain().to(torch.float32))
    assert fed.round([0]).bytes_up == 4 * (64 * 3 + 3)


@pytest.mark.parametrize("cohort", [[2], []])
def test_nobody_trains_nothing_travels(cohort):
    report = tiny_federation().round(cohort)
    assert (report.bytes_down, report.bytes_up) == (0, 0)
