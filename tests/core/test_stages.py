"""Layers computed together give what they give one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core import _linear_cuda, _stage_cuda, stages
from consilience.core.network import Network

on_gpu = pytest.mark.gpu


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(45, 7), nn.ReLU(), nn.Linear(7, 3))


def test_names_parameters_and_results_stay() -> None:
    plain, together = chain(), chain()
    together.load_state_dict(plain.state_dict())
    stages.compute_together(together)
    assert [type(m) for m in (together, together[4])] == [stages.Chain, stages.Linear]
    assert [n for n, _ in together.named_parameters()] == [n for n, _ in plain.named_parameters()]
    x = torch.randn(4, 2, 8, 8)
    torch.testing.assert_close(together(x), plain(x))


class _Recorded:
    """A backend that notes what it was asked to compute."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def usable(self, *args: object) -> bool:
        return True

    def conv_relu_pool(self, x: Tensor, w: Tensor, b: Tensor, padding: int) -> Tensor:
        self.calls.append("stage")
        return F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=padding)), 2)

    def linear(self, x: Tensor, w: Tensor, b: Tensor, relu: bool) -> Tensor:
        self.calls.append("linear+relu" if relu else "linear")
        return F.relu(F.linear(x, w, b)) if relu else F.linear(x, w, b)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    backend = _Recorded()
    monkeypatch.setattr(stages, "_stage_cuda", backend)
    monkeypatch.setattr(stages, "_linear_cuda", backend)
    return backend


def test_what_is_computed_together(recorded: _Recorded) -> None:
    model = chain()
    stages.compute_together(model)
    model(torch.randn(1, 2, 8, 8))
    assert recorded.calls == ["stage", "linear+relu", "linear"]


@pytest.mark.parametrize(("layer", "left"), [(0, ["linear+relu", "linear"]), (1, ["linear+relu", "linear"]), (2, ["linear+relu", "linear"]),
                                        (5, ["stage", "linear", "linear"])])
def test_a_layer_that_is_listened_to_runs_by_itself(recorded: _Recorded, layer: int, left: list[str]) -> None:
    model, heard = chain(), []
    stages.compute_together(model)
    model[layer].register_forward_hook(lambda m, args, out: heard.append(out))
    model(torch.randn(1, 2, 8, 8))
    assert len(heard) == 1
    assert recorded.calls == left


@pytest.mark.parametrize("odd", [nn.Conv2d(2, 5, 3, stride=2), nn.Conv2d(2, 5, (3, 1)), nn.Conv2d(2, 6, 3, groups=2),
                                 nn.Conv2d(2, 5, 3, dilation=2), nn.Conv2d(2, 5, 3, padding="same"),
                                 nn.Conv2d(2, 5, 3, padding=1, padding_mode="reflect")])
def test_other_convolutions_are_left_alone(recorded: _Recorded, odd: nn.Module) -> None:
    model = nn.Sequential(odd, nn.ReLU(), nn.MaxPool2d(2))
    stages.compute_together(model)
    model(torch.randn(1, 2, 12, 12))
    assert recorded.calls == []


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True)])
def test_other_poolings_are_left_alone(recorded: _Recorded, pool: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), pool)
    stages.compute_together(model)
    model(torch.randn(1, 2, 12, 12))
    assert recorded.calls == []


def test_points_inside_a_stage_are_heard(recorded: _Recorded) -> None:
    model = chain()
    network = Network(model, ["1", "4"])
    trace = network.forward({"params": dict(model.named_parameters()), "buffers": {}}, torch.randn(2, 2, 8, 8))
    assert trace.before["1"].shape == (2, 5, 6, 6)
    assert trace.before["4"].shape == (2, 7)
    assert "stage" not in recorded.calls


# ---- kernels ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)        # the inputs' gradient is cuDNN's


def _compare(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    """Values and gradients of ours, in float32, beside the same in float64."""
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(theirs)
    for mine, reference in zip(torch.autograd.grad(ours, leaves, weight.float(), retain_graph=True),
                               torch.autograd.grad(theirs, leaves, weight)):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5 * float(reference.abs().max()))


# samples, channels, height, width, channels out, side, padding: DBE's stages, MOON's, padded, odd maps, a part of a block
SHAPES = [(10, 1, 28, 28, 32, 5, 0), (10, 32, 12, 12, 64, 5, 0), (128, 3, 32, 32, 6, 5, 0), (128, 6, 14, 14, 16, 5, 0),
          (7, 3, 9, 11, 20, 3, 1), (1, 3, 32, 32, 32, 5, 2), (256, 1, 28, 28, 10, 5, 0)]


@on_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_stage_kernels(cuda: None, shape: tuple[int, ...], bias: bool) -> None:
    n, c, h, w, co, side, pad = shape
    torch.manual_seed(0)
    x = torch.randn(n, c, h, w, device="cuda", requires_grad=True)
    conv = nn.Conv2d(c, co, side, padding=pad, bias=bias).cuda()
    assert _stage_cuda.usable(x, conv)
    assert not _stage_cuda.usable(x[:1].expand(257, -1, -1, -1).contiguous(), conv)
    leaves = [x, *conv.parameters()]
    b = None if conv.bias is None else conv.bias.double()
    theirs = F.max_pool2d(F.relu(F.conv2d(x.double(), conv.weight.double(), b, padding=pad)), 2)
    _compare(_stage_cuda.conv_relu_pool(x, conv.weight, conv.bias, pad), theirs, leaves)


@on_gpu
@pytest.mark.parametrize(("m", "n", "k"), [(10, 512, 1024), (10, 10, 512), (128, 120, 400), (128, 84, 120), (128, 256, 84), (128, 10, 256),
                                           (1, 3, 5), (33, 17, 70)])
@pytest.mark.parametrize("relu", [True, False])
def test_linear_kernels(cuda: None, m: int, n: int, k: int, relu: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(k, n).cuda()
    x = torch.randn(m, k, device="cuda", requires_grad=True)
    theirs = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    _compare(_linear_cuda.linear(x, layer.weight, layer.bias, relu), F.relu(theirs) if relu else theirs, [x, layer.weight, layer.bias])


@on_gpu
def test_only_what_is_asked_for(cuda: None) -> None:
    conv, x = nn.Conv2d(1, 8, 3).cuda(), torch.randn(4, 1, 10, 10, device="cuda")
    (dw,) = torch.autograd.grad(_stage_cuda.conv_relu_pool(x, conv.weight, conv.bias, 0).sum(), conv.weight)
    (ref,) = torch.autograd.grad(F.max_pool2d(F.relu(conv(x)), 2).sum(), conv.weight)
    torch.testing.assert_close(dw, ref, rtol=1e-3, atol=1e-3)
    conv.requires_grad_(False)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(_stage_cuda.conv_relu_pool(x, conv.weight, conv.bias, 0).sum(), x)
    (ref,) = torch.autograd.grad(F.max_pool2d(F.relu(conv(x)), 2).sum(), x)
    torch.testing.assert_close(dx, ref, rtol=1e-3, atol=1e-3)
