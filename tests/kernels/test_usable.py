"""When kernels stand aside: while a model is traced, for maps that are too large, and where a gradient of a gradient is wanted.

The test of a kernel needs a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from consilience import rng, tree
from consilience.core.network import Network
from consilience.core.task import cross_entropy
from consilience.errors import ConfigError
from consilience.kernels import after_conv, batch_norm, group_norm, group_norm_twice, linear, stage
from consilience.kernels.derivatives import differentiable_twice, first_order
from consilience.layers import stage_cpu
from consilience.parts.kernels import cosine, ffa, fused
from kernel_device import DEVICE, needs_kernels

MODULES = (stage, after_conv, linear, batch_norm, group_norm, fused)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the kernels themselves: tensors say that they lie on a GPU, and Triton is there."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(fused, "DEVICE", "cpu")
    for module in MODULES:
        monkeypatch.setattr(module, "triton", object())


def scored(norm: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return batch_norm.usable(norm.eval(), x, None)


CONV, LINEAR, BATCH, GROUP = nn.Conv2d(2, 5, 3), nn.Linear(6, 3), nn.BatchNorm2d(2), nn.GroupNorm(2, 4)
KERNELS: dict[str, tuple[Callable[[Tensor], bool], tuple[int, ...]]] = {
    "stage": (lambda x: stage.usable(x, CONV), (4, 2, 8, 8)), "linear": (lambda x: linear.usable(x, LINEAR), (4, 6)),
    "batch norm": (lambda x: scored(BATCH, x), (4, 2, 8, 8)), "group norm": (lambda x: group_norm.usable(GROUP, x), (4, 4, 8, 8)),
    "parts": (lambda x: fused.ready(x), (4, 6)), "bias": (lambda x: after_conv.usable(x), (4, 2, 8, 8))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")            # of tracing, which the exporter that we use still does
@pytest.mark.parametrize("name", KERNELS)
def test_a_model_that_is_traced_is_made_of_pytorchs_layers(on_a_gpu: None, name: str) -> None:
    """As it is for ONNX: a kernel would be a constant of the graph, or break it."""
    usable, shape = KERNELS[name]
    answers = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            answers.append(usable(x))
            return x + 1

    x = torch.zeros(shape)
    Asking()(x)
    torch.jit.trace(Asking(), x, check_trace=False)
    assert answers == [True, False]


@pytest.mark.parametrize(("batch", "side", "usable"), [(256, 361, True), (256, 364, False), (128, 384, True)])
def test_a_stage_whose_map_has_too_many_places(on_a_gpu: None, batch: int, side: int, usable: bool) -> None:
    """Places are int32. With padding 1 the map before the pooling is as large as the picture: 256·64·361² = 2,135,179,264 numbers are less
    than 2³¹ = 2,147,483,648, and 256·64·364² = 2,170,814,464 are more, though the input has 256·3·364² = 101,756,928 only.
    """
    x = torch.empty(1, device="meta").expand(batch * 3 * side * side).as_strided((batch, 3, side, side), (3 * side**2, side**2, side, 1))
    assert stage.usable(x, nn.Conv2d(3, 64, 3, padding=1)) is usable


@pytest.mark.parametrize("shape", [(256, 32, 384, 384), (256, 64, 224, 224), (512, 64, 128, 128), (256, 64, 112, 112)])
def test_scoring_never_launches_more_programs_than_there_can_be(shape: tuple[int, ...]) -> None:
    """65,535 along the second axis. U-Net's first maps of 3×384×384 pictures, evaluated in batches of 256, need 147,456 tiles of 256
    positions by 32 channels.
    """
    x = torch.empty(shape, device="meta").to(memory_format=torch.channels_last)
    at = batch_norm._Geometry(x, batch_norm.TILE, sums=False)
    assert at.grid[1] <= 65535
    assert at.each % at.rows == 0
    assert at.grid[1] * at.each >= at.M > (at.grid[1] - 1) * at.each        # everything, and no program for nothing


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(512, 64, 224, 224), (256, 2, 2000, 2000), (10, 5, 3, 3), (32, 512, 2, 2), (128, 64, 2, 3)])
@pytest.mark.parametrize("pool", [True, False])
def test_what_follows_a_convolution_is_divided_whole(shape: tuple[int, ...], layout: torch.memory_format, pool: bool) -> None:
    at = after_conv._Geometry(torch.empty(shape, device="meta").to(memory_format=layout), pool)
    assert at.grid == (-(-shape[1] // at.how["COLS"]), at.pieces)
    assert at.pieces <= 65535
    assert at.each % at.how["ROWS"] == 0
    assert at.pieces * at.each >= at.m > (at.pieces - 1) * at.each
    assert at.m == shape[0] * at.out[2] * at.out[3]


def test_places_beyond_the_end_of_a_map_are_numbers_too() -> None:
    """The largest map, of one channel: the last program counts to the end of its share in int32."""
    at = after_conv._Geometry(torch.empty((1, 1, 1, after_conv.MOST_NUMBERS - 1), device="meta"), False)
    assert at.pieces * at.each + at.how["ROWS"] < 1 << 31


@pytest.mark.parametrize("shape", [(64, 64, 8, 8), (256, 64, 112, 112), (10, 5, 3, 3), (256, 512)])
def test_where_tiles_are_few_each_has_its_own_program(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device="meta")
    at = batch_norm._Geometry(x.to(memory_format=torch.channels_last) if len(shape) == 4 else x, batch_norm.TILE, sums=False)
    assert at.each == at.rows


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_programs_that_score_several_tiles(monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format) -> None:
    """As large maps need it, here on a small one: 8,000 positions in at least eight tiles, at most three programs."""
    needs_kernels()
    norm = nn.BatchNorm2d(6).to(DEVICE).eval()
    norm.running_mean.copy_(torch.arange(6.0))
    x = rng.normal(rng.key(0, "x"), (5, 6, 40, 40)).to(DEVICE).contiguous(memory_format=layout)
    monkeypatch.setattr(batch_norm, "BACK_TILE", 1 << 10)
    seen = []
    with torch.no_grad():
        for most in (batch_norm.MOST_PROGRAMS, 3):
            monkeypatch.setattr(batch_norm, "MOST_PROGRAMS", most)
            at = batch_norm._Geometry(x, batch_norm.TILE, sums=False)
            assert (at.each == at.rows, at.grid[1] <= 3) == ((True, False) if most > 3 else (False, True))
            seen.append(batch_norm.norm_relu(norm, x, None, True))
        assert torch.equal(*seen)
        torch.testing.assert_close(seen[0], norm(x).relu(), rtol=1e-5, atol=1e-5)


# gradients of gradients

def test_a_known_gradient_has_no_gradient() -> None:
    """loss = Σx², its gradient 2x given beforehand. The gradient's own gradient would be taken for 0: 6x, not 2 + 6x, with x³ beside."""
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    loss = lambda: fused.known((x.detach() ** 2).sum(), [x], [2 * x.detach()])
    assert torch.equal(torch.autograd.grad(loss(), x)[0], 2 * x)
    assert torch.equal(torch.autograd.grad(3 * loss() + (x**3).sum(), x)[0], 6 * x + 3 * x**2)
    with pytest.raises(ConfigError, match="create_graph"):
        torch.autograd.grad(loss() * 1.0 + (x**3).sum(), x, create_graph=True)


def test_refusing_does_not_depend_on_what_arrives() -> None:
    """PyTorch's own mark lets this through, because the 1 that the way back starts from has no graph."""
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @first_order
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return 2 * ctx.saved_tensors[0] * grads[0]

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert torch.autograd.grad(Square.apply(x).sum(), x)[0].tolist() == [2.0, 4.0]
    for loss in (Square.apply(x).sum(), (x * Square.apply(x)).sum()):
        with pytest.raises(ConfigError, match="device=cpu"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("module", [stage._Stage, after_conv._Finish, linear._Linear, batch_norm._NormRelu,
                                    group_norm._ReluNorm, fused._Known])
def test_every_kernels_way_back_refuses(module: type[torch.autograd.Function]) -> None:
    with torch.enable_grad(), pytest.raises(ConfigError, match="create_graph"):
        module.backward(None, torch.ones(()))


LAYERS = {"linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), linear, "linear"),
          "linear, ReLU": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU()), linear, "linear"),
          "stage": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), stage, "conv_relu_pool"),
          "bias": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), after_conv, "bias_relu_pool"),
          "norm": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), batch_norm, "norm_relu"),
          "groups": (lambda: nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3)), group_norm, "relu_norm")}


@pytest.mark.parametrize("layers", LAYERS)
def test_kernels_stand_aside_where_a_part_differentiates_gradients(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training passes; others have nothing to differentiate. GroupNorm has others in their place, with second derivatives."""
    make, kernels, name = LAYERS[layers]
    monkeypatch.setattr(stage_cpu, "usable", lambda *_: False)
    monkeypatch.setattr(group_norm_twice, "relu_norm", lambda norm, x: norm(x.relu()))
    monkeypatch.setattr(kernels, "usable", lambda *_: True)
    monkeypatch.setattr(kernels, name, called := Mock(side_effect=InterruptedError))
    module = make()
    model = {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    x = rng.normal(rng.key(0), (4, 3, 8, 8))
    Network(module, twice=True).forward(model, x, train=True)
    assert not called.called
    for network, train in ((Network(module), True), (Network(module, twice=True), False)):
        with pytest.raises(InterruptedError):
            network.forward(model, x, train=train)


def test_parts_kernels_inside_a_pass_stand_aside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedFA's taps and LfD's head are on the way from the loss to the input."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(fused, "DEVICE", "cpu")
    for module in (fused, ffa):
        monkeypatch.setattr(module, "triton", object())
    maps, rows = torch.zeros(2, 3, 4, 4), torch.zeros(2, 8)
    assert ffa.usable(maps)
    assert cosine.usable(rows, rows)
    with differentiable_twice():
        assert not ffa.usable(maps)
        assert not cosine.usable(rows, rows)
    assert ffa.usable(maps)


def test_attention_has_second_derivatives_where_a_part_asks() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attend(x, x, x, need_weights=False)[0].mean(1))
    module = Attends()
    model = {"params": dict(module.named_parameters()), "buffers": {}}
    x = rng.normal(rng.key(0), (4, 5, 8)).requires_grad_()
    logits = Network(module, twice=True).forward(model, x, train=True).logits
    g, = torch.autograd.grad(cross_entropy(logits, torch.arange(4) % 3), x, create_graph=True)
    back = torch.autograd.grad(g.square().sum(), list(model["params"].values()), materialize_grads=True)
    assert max(float(t.abs().max()) for t in back) > 0


def test_on_a_cpu_a_penalty_goes_through_the_model() -> None:
    """The gradient of ‖∂loss/∂x‖², as a network computes it and as PyTorch's layers do by themselves."""
    plain = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                          nn.Linear(16 * 36, 8), nn.ReLU(), nn.Linear(8, 3))
    model = tree.clone({"params": dict(plain.named_parameters()), "buffers": dict(plain.named_buffers())})
    for p in model["params"].values():
        p.requires_grad_()
    network, x, y = Network(copy.deepcopy(plain)), rng.normal(rng.key(0, "x"), (16, 2, 12, 12)).requires_grad_(), torch.arange(16) % 3
    seen = []
    for logits, params in ((plain(x), list(plain.parameters())),
                           (network.forward(model, x, train=True).logits, list(model["params"].values()))):
        g, = torch.autograd.grad(cross_entropy(logits, y), x, create_graph=True)
        seen.append(torch.autograd.grad(g.square().sum(), params, materialize_grads=True))
    assert max(float(g.abs().max()) for g in seen[0]) > 0
    for theirs, ours in zip(*seen):
        torch.testing.assert_close(ours, theirs)
