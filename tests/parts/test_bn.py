"""FedBN: nothing of a normalisation layer travels, whatever the layer is called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines import Sequential
from consilience.errors import ConfigError
from consilience.parts.bn import Bn
from consilience.testing import differences, run_tiny, tiny_federation, tiny_population


class OddNames(nn.Module):
    """BatchNorm where its name does not say so, a linear layer called bn, and BatchNorm in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.Flatten())
        self.bn = nn.Linear(27, 4)
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.downsample(x)))


class NoRunningStatistics(nn.Module):
    """InstanceNorm2d as PyTorch makes it: no parameters, no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def federation(module: nn.Module, *parts, **policy) -> Federation:
    return Federation(module, Layout(), Method(parts), tiny_population(), Policy(**({"batch": 8} | policy)), Sequential)


def test_layers_are_found_by_type():
    fed = federation(OddNames(), Bn())
    stays = {k for half in fed.model.values() for k in half} - fed.spec.shared
    suffixes = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert stays == {f"{layer}.{s}" for layer in ("downsample.1", "head.0") for s in suffixes}


def test_nothing_of_the_layers_moves_on_the_server_and_each_client_has_its_own():
    fed = run_tiny([Bn()])
    start = tiny_federation().model
    flat, first = ({k: v for half in m.values() for k, v in half.items()} for m in (fed.model, start))
    for k in fed.spec.norm:
        assert torch.equal(flat[k], first[k]), k
    a, b = (fed.client(i).tensors["local"] for i in (0, 3))
    assert set(a) == set(fed.spec.norm)
    assert not torch.equal(a["stage1.1.weight"], b["stage1.1.weight"])
    assert a["stage1.1.num_batches_tracked"].item() == 2 * 2 * 3          # rounds × epochs × batches of client 0
    assert "statistics stay on the clients" in fed.no_global_model


def test_a_client_goes_on_from_its_own_layers():
    fed = run_tiny([Bn()], rounds=1)
    own = fed.client(0).tensors["local"]
    model, _ = fed.personal_model(0)
    assert torch.equal(model["params"]["stage1.1.weight"], own["stage1.1.weight"])
    assert torch.equal(model["params"]["head.weight"], fed.model["params"]["head.weight"])


def test_it_is_the_policy_local():
    a, b = run_tiny([Bn()]), run_tiny(batchnorm="local")
    assert not differences(a, b)


def test_refused_without_such_layers():
    with pytest.raises(ConfigError, match="bn needs a model with BatchNorm layers"):
        federation(Plain(), Bn())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def test_layers_without_statistics_do_not_count():
    with pytest.raises(ConfigError, match="bn needs a model with BatchNorm layers"):
        federation(NoRunningStatistics(), Bn())
    federation(NoRunningStatistics(), batch=1).round([0])                # and a batch of one is no problem for them
