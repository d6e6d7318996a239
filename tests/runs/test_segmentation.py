"""Segmentation from masks to Dice: the task beside classification, on a small U-Net."""

from __future__ import annotations

import pytest
import torch

import consilience
from consilience import rng
from consilience.data import ClientRows, FederatedData
from consilience.errors import ConfigError


def three_sites() -> FederatedData:
    """Bright pixels of the first channel are the foreground; masks in bytes, as the prostate source stores them."""
    x = (rng.uniform(rng.key(0, "x"), (24, 3, 32, 32)) * 255).to(torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    clients = tuple(ClientRows(f"site{i}", torch.arange(8 * i, 8 * i + 6), none, torch.arange(8 * i + 6, 8 * i + 8)) for i in range(3))
    return FederatedData("toy", x, (x[:, 0] > 127).to(torch.uint8), 2, clients, task="segmentation")


@pytest.mark.parametrize("method", ["fedavg", "fedfa", "scaffold+dbe", "fedfa+mixup", "fedprox+fedsam", "fedfa+mixstyle",
                                    "fedfa+moex", "fedfa+manifold_mixup", "fedmix(pool=6)", "naivemix(pool=6)+fedfa",
                                    "fedrobust", "harmofl(low=0.1)"])
def test_methods_train_and_are_scored_by_dice(method):
    result = consilience.run(method, three_sites(), model="unet(width=4)", rounds=1, batch=2, lr=0.01)
    scores = result.records[-1]["personalised"]
    assert 0 < scores["dice_foreground"] < 1
    assert scores["dice"] != scores["dice_foreground"]
    assert scores["per_client"].keys() == {"site0", "site1", "site2"}


@pytest.mark.parametrize("method", ["fedfm", "lfd", "moon", "fedntd", "fedgen", "fedbr", "dann", "vhl"])
def test_methods_of_feature_vectors_say_so(method):
    with pytest.raises(ConfigError, match="cannot be used for segmentation"):
        consilience.run(method, three_sites(), model="unet(width=4)", rounds=1, batch=2)
