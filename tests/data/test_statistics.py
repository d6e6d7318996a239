"""The numbers of a split, against small tables worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from consilience.data import statistics
from consilience.data.federated import ClientRows, FederatedData
from consilience.errors import ConfigError

NONE = torch.zeros(0, dtype=torch.int64)


def test_effective_classes():
    counts = torch.tensor([[5, 5, 0, 0], [7, 0, 0, 0], [3, 3, 3, 3], [1, 3, 0, 0], [0, 0, 0, 0]])
    # Two equal classes give 2, one class 1, four 4; (1/4, 3/4): exp(.25 ln 4 + .75 ln 4/3) = exp(.34657 + .21576) = 1.7548.
    assert statistics.effective_classes(counts).tolist() == pytest.approx([2, 1, 4, 1.7548, 0], abs=1e-4)


def test_distances_from_the_pooled_labels():
    # Two clients with nothing in common and 2 samples each: pooled (1/2, 1/2). TV = (|1 − ½| + |0 − ½|) / 2 = ½.
    counts = torch.tensor([[2, 0], [0, 2]])
    assert statistics.total_variation(counts).tolist() == [0.5, 0.5]
    # JS: mixture (3/4, 1/4) has .81128 bits, the client 0, the pool 1: .81128 − ½ = .31128.
    assert statistics.jensen_shannon(counts).tolist() == pytest.approx([0.31128] * 2, abs=1e-5)
    assert statistics.total_variation(torch.tensor([[1, 3], [2, 6]])).tolist() == [0, 0]
    assert statistics.jensen_shannon(torch.tensor([[1, 3], [2, 6]])).tolist() == pytest.approx([0, 0], abs=1e-12)
    # The pool weighs clients by size: 9 of class 0, 1 of class 1. Client 1 is 0.9 away from it, client 0 0.1.
    assert statistics.total_variation(torch.tensor([[9, 0], [0, 1]])).tolist() == pytest.approx([0.1, 0.9])


def test_size_spread():
    told = statistics.describe_counts(torch.tensor([[1, 1], [2, 2], [3, 3], [7, 7]]))
    # Sizes 2, 4, 6, 14: median 5, mean 6.5, variance ((−4.5)² + 2.5² + .5² + 7.5²) / 4 = 20.75, deviation 4.555.
    assert told["size"]["min"] == 2
    assert told["size"]["median"] == 5
    assert told["size"]["max"] == 14
    assert told["size"]["coefficient_of_variation"] == pytest.approx(math.sqrt(20.75) / 6.5)
    assert told["samples"] == 26


@pytest.fixture
def data():
    clients = (ClientRows("a", torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3])),
               ClientRows("b", torch.tensor([4, 5, 6]), NONE, torch.tensor([7])))
    return FederatedData("made", torch.zeros(9, 1), torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1]), 3, clients)


def test_describe_counts_all_rows_of_a_client_or_one_part(data):
    assert statistics.describe(data)["counts"] == [[2, 2, 0], [1, 0, 3]]
    assert statistics.describe(data, "train")["counts"] == [[2, 0, 0], [0, 0, 3]]
    assert statistics.describe(data, "val")["counts"] == [[0, 1, 0], [0, 0, 0]]
    assert statistics.describe(data, "test")["counts"] == [[0, 1, 0], [1, 0, 0]]
    assert statistics.describe(data)["classes_held"]["mean"] == 2
    with pytest.raises(ConfigError, match="one of all, train"):
        statistics.describe(data, "training")


def test_describe_is_json(data):
    told = json.loads(json.dumps(statistics.describe(data, "val"), allow_nan=False))
    assert told["names"] == ["a", "b"]
    assert told["hash"] == data.split_hash()
    assert told["effective_classes"]["mean"] == 1                                # the client without validation rows does not count
    empty = statistics.describe_counts(torch.zeros(2, 3, dtype=torch.int64))
    json.dumps(empty, allow_nan=False)
    assert empty["samples"] == 0


def test_masks_count_as_samples():
    y = torch.zeros(5, 4, 4, dtype=torch.int64)
    assert statistics.count_labels(y, [torch.arange(3), torch.arange(3, 5)], 2).tolist() == [[3], [2]]
