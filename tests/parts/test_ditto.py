"""Ditto: the personal model by hand; the global one is FedAvg's."""

from __future__ import annotations

import pytest
import torch
from quadratic import W, scalars, walk, weight

from consilience.parts.ditto import Ditto
from consilience.testing import differences, in_model, run_tiny


def personal(fed, i):
    return fed.client(i).tensors["personal"]["ditto"]["model"]["params"][W].item()


def test_personal_model_by_hand():
    # a = 1, start 0, η = 0.1, λ = 2, one step. v = 0 − 0.1·((0 − 1) + 2·(0 − 0)) = 0.1; the global model too: 0.1.
    # round 2, received 0.1: v = 0.1 − 0.1·((0.1 − 1) + 2·(0.1 − 0.1)) = 0.19. Received in round 3: 0.19, v = 0.271.
    # With a second client at −1 the received model stays 0, and the pull shows:
    # v₂ = 0.1 − 0.1·(−0.9 + 2·0.1) = 0.17; v₃ = 0.17 − 0.1·(−0.83 + 0.34) = 0.219
    fed = scalars([Ditto(weight=2.0)], [1.0, -1.0], [1, 1])
    for expected in (0.1, 0.17, 0.219):
        fed.round()
        assert weight(fed) == pytest.approx(0.0, abs=1e-7)
        assert personal(fed, 0) == pytest.approx(expected, abs=1e-6)
        assert personal(fed, 1) == pytest.approx(-expected, abs=1e-6)


def test_pull_is_towards_the_received_model_not_the_trained_one():
    targets, sizes = [1.0, -3.0], [3, 2]
    fed = scalars([Ditto(weight=0.5, epochs=2)], targets, sizes, momentum=0.5)
    w, v = 0.0, [0.0, 0.0]
    for _ in range(2):
        received = w
        w = sum(walk(received, a, k, 0.1, 0.5) for a, k in zip(targets, sizes)) / 2
        v = [walk(x, a, 2 * k, 0.1, 0.5, lambda g, at, w0=received: g + 0.5 * (at - w0)) for x, a, k in zip(v, targets, sizes)]
        fed.round()
        assert weight(fed) == pytest.approx(w, abs=1e-6)
        assert [personal(fed, i) for i in (0, 1)] == pytest.approx(v, abs=1e-5)


def test_global_model_is_fedavgs_bit_for_bit():
    assert not differences(run_tiny(), run_tiny([Ditto(weight=3.0, epochs=2)]), only=in_model)


def test_absent_clients_keep_their_model_and_others_are_served_theirs():
    fed = run_tiny([Ditto()], rounds=1)
    before = fed.client(0).tensors["personal"]["ditto"]["model"]
    fed.round([1, 3])
    assert fed.client(0).tensors["personal"]["ditto"]["model"] is before
    model, taps = fed.personal_model(0)
    assert torch.equal(model["params"]["head.weight"], before["params"]["head.weight"])
    assert not taps


def test_statistics_of_the_two_models_are_apart():
    # client 0: 3 batches × 2 epochs move the global branch, 3 × 1 the personal one
    fed = run_tiny([Ditto(epochs=1)], rounds=1)
    own = fed.client(0).tensors["personal"]["ditto"]["model"]["buffers"]
    assert own["stage1.1.num_batches_tracked"].item() == 3
