"""Published splits on the real files: counts of FedFM's NIID-2 and NIID-3, FedBR's PACS, and pixels rotated as Pillow does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consilience import rng
from consilience.data import load, shifts, sources, statistics
from consilience.errors import DataError

pytestmark = pytest.mark.real_data


def loaded(name, *args, **kwargs):
    try:
        sources.make(name).read(None)
    except DataError as absent:
        pytest.skip(f"{name} is not in the data directory: {absent}")
    return load(name, *args, **kwargs)


def test_niid_2_and_3_of_cifar10():
    data = loaded("cifar10", "dominant_class", 10, test="global")
    counts = torch.tensor(statistics.describe(data)["counts"])
    assert torch.equal(counts, torch.full((10, 10), 300) + 2000 * torch.eye(10, dtype=torch.int64))
    assert len(data.test) == 10000
    data = loaded("cifar10", "missing_classes(missing=3)", 10, test="global")
    assert statistics.describe(data)["size"]["min"] == statistics.describe(data)["size"]["max"] == 7 * 714


def test_pacs_halves():
    data = loaded("pacs", "domain_halves")
    counts = torch.tensor(statistics.describe(data)["counts"])
    assert counts.shape == (8, 7)
    # art_painting 2048, cartoon 2344, photo 1670, sketch 3929
    assert counts.sum(1).reshape(4, 2).sum(1).tolist() == [2048, 2344, 1670, 3929]
    assert int(counts[::2, 4:].sum()) == int(counts[1::2, :4].sum()) == 0


def test_rotated_mnist_equals_pillow():
    image_module = pytest.importorskip("PIL.Image")
    data = loaded("mnist", "client_dirichlet_prior(alpha=0.1)", 10)
    rows = [c.train for c in data.clients]
    turned = shifts.make("rotation(step=15)").apply(data.x, rows, rng.key(0))
    for client, mine in enumerate(rows):
        for row in mine[:20].tolist():
            expected = np.asarray(image_module.fromarray(data.x[row, 0].numpy()).rotate(15 * client))
            assert np.array_equal(turned[row, 0].numpy(), expected)
