"""`layout=auto`: channels side by side on a GPU where convolutions are wide, else contiguous."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from consilience.core import memory_layout
from consilience.core.memory_layout import settle_layout
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.models import make
from consilience.testing import tiny_federation

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Viewing(nn.Module):
    """Flattens its maps by `view`, which needs contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


class ViewingInTraining(Viewing):
    """Has a layer for training alone, which does so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.head(self.conv(x).flatten(1))


class FiveAxes(nn.Module):
    """A parameter of five axes has no such layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.place = nn.Conv2d(3, 64, 3, padding=1), nn.Parameter(torch.zeros(1, 1, 1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x)[:, :, None] + self.place).flatten(1)


def samples(*shape: int) -> Population:
    return Population(torch.zeros(6, *shape, dtype=torch.uint8), torch.arange(6), (torch.arange(6),), 10, as_float)


def settled(module: nn.Module, device: torch.device, asked: str = "auto", population: Population | None = None) -> str:
    return settle_layout(Policy(layout=asked), module, population or samples(3, 4, 4), device).layout


@pytest.mark.parametrize(("channels", "groups", "layout"), [(63, 1, "contiguous"), (64, 1, "channels_last"), (64, 64, "contiguous"),
                                                            (128, 2, "channels_last")])
def test_width_decides(monkeypatch: pytest.MonkeyPatch, channels: int, groups: int, layout: str) -> None:
    """A kernel of a convolution in groups sees channels / groups of them: 64 / 64 = 1, 128 / 2 = 64."""
    monkeypatch.setattr(memory_layout, "_accepts_turned", lambda *given: True)
    module = nn.Sequential(nn.Conv2d(3, channels, 1), nn.Conv2d(channels, channels, 3, groups=groups))
    assert settled(module, GPU) == layout
    assert settled(module, CPU) == "contiguous"
    assert settled(module, CPU, "channels_last") == "channels_last"
    assert settled(module, GPU, "contiguous") == "contiguous"


@pytest.mark.parametrize(("name", "sample", "layout"), [("fedavg_cnn", (1, 28, 28), "contiguous"), ("moon_cnn", (3, 32, 32), "contiguous"),
                                                        ("vgg11", (3, 32, 32), "channels_last"), ("resnet18", (3, 32, 32), "channels_last"),
                                                        ("mnist_cnn", (1, 28, 28), "channels_last")])
def test_our_models(monkeypatch: pytest.MonkeyPatch, name: str, sample: tuple[int, ...], layout: str) -> None:
    """As it was measured to be faster for each (docs/performance-gpu.md); they accept it, which is asked on the CPU here."""
    accepts = memory_layout._accepts_turned
    monkeypatch.setattr(memory_layout, "_accepts_turned", lambda module, population, device: accepts(module, population, CPU))
    module = make(name, sample=sample, classes=10, key=torch.tensor(0)).module
    assert settled(module, GPU, population=samples(*sample)) == layout


def test_a_model_that_needs_contiguous_maps_gets_them() -> None:
    module = Viewing()
    before = {k: (v.clone(), v.stride()) for k, v in module.state_dict().items()}
    assert not memory_layout._accepts_turned(module, samples(3, 4, 4), CPU)
    assert memory_layout._accepts_turned(nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten()), samples(3, 4, 4), CPU)
    assert not memory_layout._accepts_turned(nn.Linear(3, 2), samples(3), CPU)           # no maps at all
    assert module.training
    for k, v in module.state_dict().items():
        assert torch.equal(v, before[k][0]), k
        assert v.stride() == before[k][1], k


@pytest.mark.parametrize("module", [ViewingInTraining(), FiveAxes()])
def test_what_only_training_or_the_parameters_show(module: nn.Module) -> None:
    assert not memory_layout._accepts_turned(module, samples(3, 4, 4), CPU)


def test_trying_draws_nothing() -> None:
    module, before = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Dropout(), nn.Flatten()), torch.get_rng_state()
    assert memory_layout._accepts_turned(module, samples(3, 4, 4), CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_a_federation_and_its_twins_have_what_was_settled() -> None:
    fed = tiny_federation(layout="auto")
    assert fed.policy.layout == fed.made_of[-1].layout == fed.spec.policy.layout == "contiguous"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    module = make("resnet18", sample=(3, 32, 32), classes=10, key=torch.tensor(0)).module
    assert settled(module, GPU, population=samples(3, 32, 32)) == "channels_last"
    assert settled(Viewing(), GPU) == "contiguous"
