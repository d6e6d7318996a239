"""Bytes, memory and seconds by hand."""

from __future__ import annotations

import pytest

from consilience.metrics.costs import client_memory, model_size, seconds, traffic
from consilience.parts.stack import parse_stack
from consilience.testing import tiny_federation

RECORDS = [
    {"round": 0, "cohort": ["a", "b"], "idle": [], "lost": [], "bytes_up": 10, "bytes_down": 100, "measured": {"seconds": 4.0}},
    {"round": 1, "cohort": ["a", "b", "c"], "idle": ["c"], "lost": ["b"], "bytes_up": 30, "bytes_down": 80, "measured": {"seconds": 1.0}},
    {"round": 2, "cohort": ["a", "b"], "idle": [], "lost": [], "bytes_up": 60, "bytes_down": 60, "measured": {"seconds": 3.0}},
]


def test_traffic_by_hand():
    got = traffic(RECORDS)
    # up: a in round 1 (b was lost, c made no step), a and b in round 2: 90 bytes over 3; down: b had received: 140 over 4
    assert got["rounds"] == 2
    assert got["up"] == {"total_bytes": 100, "bytes_per_round": 45.0, "last_round_bytes": 60, "bytes_per_client_and_round": 30.0}
    assert got["down"] == {"total_bytes": 240, "bytes_per_round": 70.0, "last_round_bytes": 60, "bytes_per_client_and_round": 35.0}
    assert traffic([])["up"]["bytes_per_round"] is None


def test_seconds_by_hand():
    assert seconds(RECORDS) == {"total": 8.0, "rounds": 2, "mean_per_round": 2.0, "median_per_round": 2.0, "slowest_round": 3.0}
    assert seconds([])["mean_per_round"] is None


def memory(method: str, **policy):
    return client_memory(tiny_federation(parse_stack(method).parts, **policy))


def test_memory_in_models():
    plain = memory("fedavg", momentum=0.0)
    assert plain["between_rounds_bytes"] == 0
    assert plain["in_a_round_in_models"] == pytest.approx(2.0, abs=0.01)         # the model in training and the one received
    assert memory("moon", momentum=0.0)["between_rounds_in_models"] == pytest.approx(1.0)      # the previous model (FedFM, Table II)
    # DBE keeps one vector of twelve numbers
    assert memory("dbe")["by_home"]["personal"] == 12 * 4
    # momentum kept between rounds counts between rounds; else in a round only
    kept, reset = memory("fedavg", optimiser_state="kept"), memory("fedavg")
    assert kept["by_home"]["optimiser"] > 0
    assert reset["by_home"]["optimiser"] == 0
    assert kept["in_a_round_bytes"] == reset["in_a_round_bytes"]


def test_model_size():
    # conv 4·9 + 4, BN 8, linear 64·12 + 12, BN 24, header 12·12 + 12, head 12·3 + 3; buffers: mean, variance, counter of each BN
    got = model_size(tiny_federation())
    assert got["parameters"] == 40 + 8 + 780 + 24 + 156 + 39
    assert got["buffers"] == 9 + 25
    assert got["travelling"] == got["parameters"] + got["buffers"]
    local = model_size(tiny_federation(parse_stack("local").parts))
    assert local["travelling"] == 0
