"""Layers computed together give what they give one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core.network import Network
from consilience.kernels import linear, stage
from consilience.layers import stages
from kernel_device import DEVICE, INTERPRETED, ON_HOST, needs_kernels
from listening import LISTEN

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
    monkeypatch.setattr(stages, "stage", backend)
    monkeypatch.setattr(stages, "linear", backend)
    return backend


def test_what_is_computed_together(recorded: _Recorded) -> None:
    model = chain()
    stages.compute_together(model)
    model(torch.randn(1, 2, 8, 8))
    assert recorded.calls == ["stage", "linear+relu", "linear"]


@pytest.mark.parametrize(("layer", "left"), [(0, ["linear+relu", "linear"]), (1, ["linear+relu", "linear"]), (2, ["linear+relu", "linear"]),
                                        (5, ["stage", "linear", "linear"])])
@pytest.mark.parametrize("listen", LISTEN)
def test_a_layer_that_is_listened_to_runs_by_itself(recorded: _Recorded, layer: int, left: list[str], listen: str) -> None:
    model, heard = chain(), []
    stages.compute_together(model)
    LISTEN[listen](model[layer], lambda: heard.append(layer))
    model(torch.randn(1, 2, 8, 8, requires_grad=True)).sum().backward()
    assert heard == [layer]
    assert recorded.calls == left


def test_hooks_on_every_module_hear_every_layer(recorded: _Recorded) -> None:
    model, heard = chain(), []
    stages.compute_together(model)
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: heard.append(type(m)))
    try:
        model(torch.randn(1, 2, 8, 8))
    finally:
        hook.remove()
    assert heard == [nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, stages.Linear, nn.ReLU, stages.Linear, stages.Chain]
    assert recorded.calls == ["linear", "linear"]


def test_a_hook_scales_the_gradient() -> None:
    """A tenth of what comes back to the ReLU: a tenth of the convolution's gradient."""
    seen = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
        stages.compute_together(model)
        if hooked:
            model[1].register_full_backward_hook(lambda m, into, out: (into[0] * 0.1,))
        seen.append(torch.autograd.grad(model(torch.ones(1, 2, 8, 8)).sum(), model[0].weight)[0])
    torch.testing.assert_close(seen[1], seen[0] * 0.1)


class CappedRelu(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(max=0.1)


class Average(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.avg_pool2d(input, 2)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Viewing(nn.Conv2d):
    """Looks at its input as rows, which it cannot where channels lie together."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.view(len(input), -1).mean()


@pytest.mark.parametrize(("conv", "relu", "pool", "linear"), [
    (nn.Conv2d, CappedRelu, nn.MaxPool2d, nn.Linear), (nn.Conv2d, nn.ReLU, Average, nn.Linear), (Viewing, nn.ReLU, nn.MaxPool2d, nn.Linear),
    (nn.Conv2d, nn.ReLU, nn.MaxPool2d, Doubled)])
@pytest.mark.parametrize("half", [False, True])
def test_layers_of_a_users_own_run(conv: type, relu: type, pool: type, linear: type, half: bool) -> None:
    model = nn.Sequential(conv(2, 16, 3), relu(), pool(2), nn.Flatten(), linear(144, 7), relu(), linear(7, 3))
    x, state = torch.randn(4, 2, 8, 8), {"params": dict(model.named_parameters()), "buffers": {}}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs = model(x).float()
    ours = Network(model, half=half).forward(state, x).logits
    torch.testing.assert_close(ours, theirs, **({"rtol": 0.02, "atol": 0.02} if half else {}))


@pytest.mark.parametrize("half", [False, True])
def test_layers_are_called_by_keyword(half: bool) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pool = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU()), nn.MaxPool2d(2)
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(144, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(input=self.drop(input=self.pool(input=self.body(input=x)).flatten(1)))
    module, x = Named().eval(), torch.randn(4, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs = module(x).float()
    network = Network(module, ["head:input"], half=half)
    trace = network.forward({"params": dict(module.named_parameters()), "buffers": {}}, x, tap=lambda trace, point, h: h * 1)
    torch.testing.assert_close(trace.logits, theirs, **({"rtol": 0.02, "atol": 0.02} if half else {}))
    assert trace.before["head:input"].shape == (4, 144)


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
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels()
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
LINEARS = [(10, 512, 1024), (10, 10, 512), (128, 120, 400), (128, 84, 120), (128, 256, 84), (128, 10, 256), (1, 3, 5), (33, 17, 70)]
if INTERPRETED:             # a program at a time, in Python: the same blocks on small maps. The first has two pieces of its sums.
    SHAPES = [(7, 3, 9, 11, 20, 3, 1), (2, 1, 10, 10, 40, 5, 0), (2, 12, 7, 6, 6, 5, 2), (1, 20, 6, 6, 3, 5, 0)]
    LINEARS = [(10, 40, 600), (40, 10, 130), (1, 3, 5), (33, 17, 70)]


@on_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_stage_kernels(kernels: None, shape: tuple[int, ...], bias: bool) -> None:
    n, c, h, w, co, side, pad = shape
    torch.manual_seed(0)
    x = torch.randn(n, c, h, w, device=DEVICE, requires_grad=True)
    conv = nn.Conv2d(c, co, side, padding=pad, bias=bias).to(DEVICE)
    if not ON_HOST:                                 # the choice looks at the device
        assert stage.usable(x, conv)
        assert not stage.usable(x[:1].expand(257, -1, -1, -1).contiguous(), conv)
    leaves = [x, *conv.parameters()]
    b = None if conv.bias is None else conv.bias.double()
    theirs = F.max_pool2d(F.relu(F.conv2d(x.double(), conv.weight.double(), b, padding=pad)), 2)
    _compare(stage.conv_relu_pool(x, conv.weight, conv.bias, pad), theirs, leaves)


@on_gpu
@pytest.mark.parametrize(("m", "n", "k"), LINEARS)
@pytest.mark.parametrize("relu", [True, False])
def test_linear_kernels(kernels: None, m: int, n: int, k: int, relu: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(k, n).to(DEVICE)
    x = torch.randn(m, k, device=DEVICE, requires_grad=True)
    theirs = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    _compare(linear.linear(x, layer.weight, layer.bias, relu), F.relu(theirs) if relu else theirs, [x, layer.weight, layer.bias])


@on_gpu
def test_only_what_is_asked_for(kernels: None) -> None:
    conv, x = nn.Conv2d(1, 8, 3).to(DEVICE), torch.randn(4, 1, 10, 10, device=DEVICE)
    (dw,) = torch.autograd.grad(stage.conv_relu_pool(x, conv.weight, conv.bias, 0).sum(), conv.weight)
    (ref,) = torch.autograd.grad(F.max_pool2d(F.relu(conv(x)), 2).sum(), conv.weight)
    torch.testing.assert_close(dw, ref, rtol=1e-3, atol=1e-3)
    conv.requires_grad_(False)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(stage.conv_relu_pool(x, conv.weight, conv.bias, 0).sum(), x)
    (ref,) = torch.autograd.grad(F.max_pool2d(F.relu(conv(x)), 2).sum(), x)
    torch.testing.assert_close(dx, ref, rtol=1e-3, atol=1e-3)
