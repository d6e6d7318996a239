"""Bias, ReLU and pooling after a convolution, computed together, give what PyTorch's layers give one by one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core.network import Network
from consilience.kernels import after_conv
from consilience.layers import bfloat16, stages
from kernel_device import DEVICE, INTERPRETED, needs_cuda, needs_kernels
from listening import LISTEN

on_gpu = pytest.mark.gpu
FORMS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class _Recorded:
    """A backend that notes what it was asked to compute."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def usable(self, x: Tensor) -> bool:
        return True

    def bias_relu_pool(self, raw: Tensor, bias: Tensor, pool: bool) -> Tensor:
        self.calls.append("bias+relu+pool" if pool else "bias+relu")
        maps = F.relu(raw + bias[:, None, None])
        return F.max_pool2d(maps, 2) if pool else maps


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    backend = _Recorded()
    monkeypatch.setattr(stages, "after_conv", backend)
    monkeypatch.setattr(stages.stage_cpu, "usable", lambda *a: False)
    return backend


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2, padding="valid"), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Conv2d(4, 3, 1), nn.ReLU(), nn.MaxPool2d(2, stride=1))


def test_what_is_computed_together(recorded: _Recorded) -> None:
    """The bias of any convolution; the pooling only where windows of 2×2 lie side by side."""
    plain, model = chain(), chain()
    model.load_state_dict(plain.state_dict())
    stages.compute_together(model)
    x = torch.randn(3, 2, 20, 20)
    torch.testing.assert_close(model(x), plain(x))
    assert recorded.calls == ["bias+relu", "bias+relu+pool", "bias+relu"]


@pytest.mark.parametrize(("layer", "left"), [(0, ["bias+relu+pool", "bias+relu"]), (1, ["bias+relu+pool", "bias+relu"]),
                                             (2, ["bias+relu", "bias+relu"]), (4, ["bias+relu", "bias+relu", "bias+relu"])])
@pytest.mark.parametrize("listen", LISTEN)
def test_a_layer_that_is_listened_to_runs_by_itself(recorded: _Recorded, layer: int, left: list[str], listen: str) -> None:
    model, heard = chain(), []
    stages.compute_together(model)
    LISTEN[listen](model[layer], lambda: heard.append(layer))
    model(torch.randn(1, 2, 20, 20, requires_grad=True)).sum().backward()
    assert heard == [layer]
    assert recorded.calls == left


def test_without_a_bias_there_is_nothing_to_do(recorded: _Recorded) -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2))
    stages.compute_together(model)
    model(torch.randn(1, 2, 8, 8))
    assert recorded.calls == []


@pytest.mark.parametrize("fits", [True, False])
def test_before_a_group_norm(recorded: _Recorded, monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    """Bias and ReLU go with the norm where it takes maps of this kind, else by themselves."""
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4))
    model = copy.deepcopy(plain)
    stages.compute_together(model)

    class Groups:
        usable = staticmethod(lambda norm, x: fits)

        @staticmethod
        def relu_norm(norm: nn.GroupNorm, x: Tensor, before: Tensor) -> Tensor:
            recorded.calls.append("bias+relu+norm")
            return norm(F.relu(x + before[:, None, None]))

    monkeypatch.setattr(stages, "group_norm", Groups)
    x = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(model(x), plain(x))
    assert recorded.calls == ["bias+relu+norm" if fits else "bias+relu"]
    recorded.calls.clear()
    model[2].register_forward_hook(lambda *a: None)
    model(x)
    assert recorded.calls == ["bias+relu"]


def test_in_bfloat16_the_weights_laid_ready_are_used(recorded: _Recorded) -> None:
    """Values and gradients are those of maps and biases in bfloat16, in the first pass, which casts layer by layer, and in later ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.randn(4, 2, 12, 12), torch.tensor([0, 1, 2, 0])
    weights = dict(model.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        maps = F.max_pool2d(F.relu(F.conv2d(x, weights["0.weight"]) + weights["0.bias"].bfloat16()[:, None, None]), 2)
        maps = F.relu(F.conv2d(maps, weights["3.weight"]) + weights["3.bias"].bfloat16()[:, None, None])
    wanted = F.linear(maps.flatten(1).float(), weights["6.weight"], weights["6.bias"])      # small linear layers stay in float32 on a CPU
    theirs = torch.autograd.grad(F.cross_entropy(wanted, y), list(weights.values()))
    network = Network(model, half=True)
    for _ in range(3):
        got = network.forward({"params": weights, "buffers": {}}, x).logits
        torch.testing.assert_close(got, wanted)
        for mine, reference in zip(torch.autograd.grad(F.cross_entropy(got, y), list(weights.values())), theirs):
            torch.testing.assert_close(mine, reference)
    assert recorded.calls == ["bias+relu+pool", "bias+relu"] * 3


def test_weights_laid_ready_serve_one_call() -> None:
    conv = nn.Conv2d(2, 3, 1)
    together = bfloat16.Together(conv)
    x = torch.randn(1, 2, 4, 4)
    conv(x)
    with together, torch.autocast("cpu", torch.bfloat16):
        conv(x)                                     # notes that it runs
    with together, torch.autocast("cpu", torch.bfloat16):
        ready = dict(conv._seen.ready)
        assert set(ready) == {"weight", "bias"}
        maps, bias = bfloat16.without_bias(conv, x)
        assert bias is ready["bias"]
        torch.testing.assert_close(maps + bias[:, None, None], conv(x), rtol=0.02, atol=0.02)
        assert bfloat16.without_bias(conv, x)[1] is not ready["bias"]
    assert conv.bias.dtype == torch.float32


# ---- kernels ---------------------------------------------------------------------------------------------------------

# samples, channels, height, width: VGG11's maps, odd ones, one position, channels that fill no block
SHAPES = [(32, 64, 32, 32), (32, 128, 16, 16), (32, 256, 8, 8), (32, 512, 4, 4), (32, 512, 2, 2), (7, 33, 9, 11), (5, 3, 2, 2),
          (300, 8, 6, 6)]
if INTERPRETED:             # a program at a time, in Python
    SHAPES = [(9, 5, 16, 16), (2, 40, 9, 7), (3, 3, 2, 2), (5, 70, 4, 4)]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def kernels() -> None:
    needs_kernels()


@on_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_kernels(kernels: None, shape: tuple[int, ...], pool: bool, kind: str, form: str) -> None:
    """Forward and the maps' gradient bit for bit; the bias's gradient is a sum in another order. Coarse numbers: windows have ties."""
    torch.manual_seed(0)
    raw = (torch.randn(shape, device=DEVICE).mul(4).round() / 4).to(TYPES[kind]).contiguous(memory_format=FORMS[form]).requires_grad_()
    bias = torch.randn(shape[1], device=DEVICE)
    if INTERPRETED:                                 # which cuts numbers off where bfloat16 rounds them
        bias = bias.mul(4).round() / 4
    bias = bias.to(TYPES[kind]).requires_grad_()
    ours = after_conv.bias_relu_pool(raw, bias, pool)
    theirs = F.relu(raw + bias[:, None, None])
    theirs = F.max_pool2d(theirs, 2) if pool else theirs
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous(memory_format=FORMS[form])
    g = torch.randn_like(theirs)
    mine, reference = torch.autograd.grad(ours, (raw, bias), g), torch.autograd.grad(theirs, (raw, bias), g)
    assert torch.equal(mine[0], reference[0])
    exact = reference[0].double().sum((0, 2, 3))
    size = reference[0].double().abs().sum((0, 2, 3)).max().item()
    torch.testing.assert_close(mine[1].double(), exact, rtol=0.01 if kind == "bfloat16" else 1e-5, atol=1e-6 * size)


@on_gpu
@pytest.mark.parametrize("pool", [True, False])
def test_not_a_number_comes_through(kernels: None, pool: bool) -> None:
    raw = torch.zeros(1, 2, 4, 4, device=DEVICE)
    raw[0, 0, 0, 1] = float("nan")
    out = after_conv.bias_relu_pool(raw, torch.ones(2, device=DEVICE), pool)
    theirs = F.relu(raw + 1)
    torch.testing.assert_close(out, F.max_pool2d(theirs, 2) if pool else theirs, equal_nan=True)


@on_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "pool"), [((2, 1, 4, 6), True), ((2, 1, 4, 6), False), ((2, 3, 1, 1), False), ((1, 2, 2, 2), True)])
def test_where_both_layouts_are_one_the_strides_decide(kernels: None, shape: tuple[int, ...], pool: bool, form: str) -> None:
    """Maps of one channel, or one position. The next convolution looks at strides, so a run in one layout must not turn to the other."""
    n, c, h, w = shape
    raw = torch.empty(shape, device=DEVICE, memory_format=FORMS[form]).normal_()
    out = after_conv.bias_relu_pool(raw, torch.randn(c, device=DEVICE), pool)
    h, w = (h // 2, w // 2) if pool else (h, w)
    assert out.shape == (n, c, h, w)
    assert out.stride() == ((c * h * w, 1, c * w, c) if form == "channels_last" else (c * h * w, h * w, w, 1))


@on_gpu
def test_inputs_stay_as_they_were(kernels: None) -> None:
    raw, bias = torch.randn(2, 3, 6, 6, device=DEVICE), torch.randn(3, device=DEVICE)
    before = raw.clone(), bias.clone()
    after_conv.bias_relu_pool(raw, bias, True)
    assert torch.equal(raw, before[0])
    assert torch.equal(bias, before[1])


@pytest.mark.parametrize("pool", [True, False])
def test_maps_without_numbers_are_pytorchs(pool: bool) -> None:
    raw, bias = torch.randn(0, 3, 6, 6), torch.randn(3)
    assert after_conv.bias_relu_pool(raw, bias, pool).shape == (0, 3, *((3, 3) if pool else (6, 6)))
    if pool:
        with pytest.raises(RuntimeError, match="too small"):
            after_conv.bias_relu_pool(torch.randn(1, 3, 1, 6), bias, pool)


@on_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", [False, True], ids=["float32", "bfloat16"])
def test_a_model_learns_as_without(form: str, precision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cuda()
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = nn.Sequential(nn.Conv2d(3, 80, 3, padding=1), nn.ReLU(), nn.Conv2d(80, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                           nn.Flatten(), nn.Linear(96 * 64, 10)).cuda().to(memory_format=FORMS[form])
    x, y = torch.randn(16, 3, 16, 16, device="cuda").contiguous(memory_format=FORMS[form]), torch.randint(0, 10, (16,), device="cuda")
    network = Network(module, half=precision)
    state = {"params": dict(module.named_parameters()), "buffers": {}}
    found = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(after_conv, "usable", lambda x: False)
        for _ in range(2):                          # the second pass has its weights laid ready
            logits = network.forward(state, x).logits
        found.append((logits, *torch.autograd.grad(F.cross_entropy(logits, y), list(module.parameters()))))
    for mine, theirs in zip(*found):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0.02 if precision else 1e-4, atol=(0.02 if precision else 1e-5) * scale)
