"""Samples that go through the main pass beside the batch: when they may, who sees them, and that nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from core_parts import Plain, federation, seeded
from torch import Tensor, nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.network import Network
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.step_view import StepView
from consilience.data.federated import as_float
from consilience.models import make
from consilience.parts.registry import find_part
from consilience.testing import WatchedSequential, largest_difference, tiny_population


@dataclass(frozen=True)
class Beside(Part):
    """Asks for the mean first logit of its own samples; notes what others would see of the pass."""

    name = "beside"

    def init_shared(self, spec: Any) -> Any:
        return {"x": torch.linspace(10.0, 30.0, 3).reshape(3, *[1] * len(spec.sample)).expand(3, *spec.sample).clone()}

    def init_scratch(self, c: Any) -> Any:
        return {"rows": torch.zeros(3)}

    def beside(self, v: StepView) -> Tensor:
        return v.shared["x"]

    def track(self, v: StepView) -> Any:
        shown = (v.features, v.trace.after[v.spec.features], v.trace.logits)
        return {"rows": torch.tensor([float(len(t)) for t in shown])}

    def loss(self, v: StepView) -> Tensor:
        return v.forward(v.model, v.shared["x"], train=True, label="own").logits[:, 0].mean()


@dataclass(frozen=True)
class FirstLogit(Part):
    name = "first_logit"

    def main_loss(self, v: StepView) -> Tensor:
        return v.trace.logits[:, 0].mean()


@dataclass(frozen=True)
class Tapping(Part):
    name = "tapping"

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Relabelling(Part):
    name = "relabelling"

    def relabel(self, v: StepView) -> Tensor:
        return v.batch.target


class Centred(nn.Module):
    """A layer of a user's own, in which samples see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class OneWay(nn.Module):
    """A sample adds to those that come `by` places later: the first two are none the wiser."""

    def __init__(self, by: int = 1) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return x + torch.cat([torch.zeros_like(x[:self.by]), x[:-self.by]])


class OverTheBatch(nn.Module):
    """A mistake that trains all the same: the batch is taken for time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.flatten(1))[0]


class Shares(nn.Module):
    """Divides by the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) / len(x)


class Counting(nn.Module):
    """A buffer that moves in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return x.flatten(1)


def shared(fed: Federation) -> bool:
    return bool(fed.program.hooks["main"]["beside"])


def plain(*parts: Part, **how: Any) -> Federation:
    return federation(seeded(Plain), Beside(), *parts, **how)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples of every training pass since."""
    seen: list[int] = []
    real = Network.forward

    def forward(self: Network, model: Any, x: Tensor, train: bool = False, *more: Any, **named: Any) -> Any:
        if train:
            seen.append(len(x))
        return real(self, model, x, train, *more, **named)
    monkeypatch.setattr(Network, "forward", forward)
    return seen


@pytest.mark.parametrize("apart", [False, True])
def test_by_hand(passes: list[int], apart: bool) -> None:
    """Logits w·x. Batch (1, 3): mean 2. Beside it (10, 20, 30): mean 20. Loss w₀·2 + w₀·20, gradient 22 for w₀ and 0 for w₁.

    From w = (1, 5) with lr 0.1: the loss is 22, w₀ = 1 − 2.2 = −1.2, w₁ = 5.
    """
    module = nn.Sequential()
    module.add_module("head", nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        module.head.weight.copy_(torch.tensor([[1.0], [5.0]]))  # type: ignore[union-attr, operator]
    population = Population(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]), (torch.arange(2),), 2, as_float)
    fed = federation(module, Beside(), FirstLogit(), population=population, layout=Layout(), batch=2, lr=0.1, epochs=1, weights="samples")
    assert shared(fed)
    if apart:
        fed.program.hooks["main"]["beside"] = []
    passes.clear()
    report = fed.round()
    assert passes == ([2, 3] if apart else [5])
    assert report.losses[0] == pytest.approx(22.0)
    assert fed.model["params"]["head.weight"].flatten().tolist() == pytest.approx([-1.2, 5.0])


def test_others_see_the_batch_alone(passes: list[int]) -> None:
    """Batches of 8 and, last, of 4: features and logits have as many rows, and only the pass itself three more."""
    fed = plain(population=tiny_population((12,)), epochs=1, last_batch="keep")
    passes.clear()
    seen: list[list[float]] = []
    real = type(fed.program).step

    def step(self: Any, slot: Any, phase: Any, size: int) -> Any:
        taken = real(self, slot, phase, size)
        seen.append(slot.scratch["beside"]["rows"].tolist())
        return taken
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fed.program), "step", step)
        fed.round()
    assert passes == [11, 7]
    assert seen == [[8.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_rounds_come_out_as_with_two_passes(layout: str) -> None:
    def fed() -> Federation:
        body = lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten())
        return Federation(seeded(lambda: Plain(body(), width=256)), Layout(), Method([Beside()]), tiny_population(),
                          Policy(batch=8, lr=0.001, layout=layout), WatchedSequential)
    one, two = fed(), fed()
    assert shared(one)
    two.program.hooks["main"]["beside"] = []
    for _ in range(2):
        one.round()
        two.round()
    assert largest_difference(one, two) < 2e-6


@pytest.mark.parametrize("part", [Tapping(), Relabelling(), find_part("sam")()], ids=lambda p: p.name)
def test_two_passes_beside_taps_new_labels_and_second_points(passes: list[int], part: Part) -> None:
    assert shared(plain())
    fed = plain(part, epochs=1, steps=1)
    assert not shared(fed)
    passes.clear()
    fed.round([0])
    assert passes == [8, 3] * (2 if part.name == "sam" else 1)


@pytest.mark.parametrize("body", [nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), Centred(),
                                  OneWay(), OneWay(3), OverTheBatch(), Shares(), Counting(),
                                  nn.Sequential(nn.InstanceNorm2d(1), nn.Flatten())], ids=lambda b: type(b).__name__)
def test_two_passes_where_samples_see_each_other(passes: list[int], body: nn.Module) -> None:
    fed = federation(seeded(lambda: Plain(body)), Beside(), epochs=1, steps=1)
    assert not shared(fed)
    passes.clear()
    fed.round([0])
    assert passes == [8, 3]


@pytest.mark.parametrize("body", [nn.Sequential(nn.GroupNorm(1, 1), nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Dropout(0.0)),
                                  nn.Sequential(nn.Flatten(), nn.LayerNorm(64))], ids=("groups", "no dropout", "layers"))
def test_one_pass_where_they_do_not(body: nn.Module) -> None:
    assert shared(federation(seeded(lambda: Plain(body)), Beside()))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["fedavg_cnn", "mnist_cnn", "moon_cnn"])
def test_one_pass_for_our_models(name: str, half: bool) -> None:
    """Rounding between batches of two and seven is no dependence."""
    shape = (3, 32, 32) if name == "moon_cnn" else (1, 28, 28)
    module = make(name, sample=shape, classes=10, key=rng.key(0, "m")).module
    model = {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    assert Network(module, ["head:input"], half=half).keeps_samples_apart(model, rng.normal(rng.key(1), (2, *shape)))


def test_two_equal_samples_prove_nothing() -> None:
    p = tiny_population()
    same = Population(p.x[:1].expand_as(p.x).clone(), p.y, p.rows, 3, as_float, p.names, p.proxy)
    assert not shared(plain(population=same))


def test_samples_of_another_shape_go_by_themselves(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beside, "init_shared", lambda self, spec: {"x": torch.ones(3, 1, 4, 16)})
    fed = plain(epochs=1, steps=1)
    passes.clear()
    fed.round([0])
    assert passes == [8, 3]
