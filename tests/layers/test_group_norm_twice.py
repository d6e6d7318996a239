"""ReLU and GroupNorm, and the convolution before them, where gradients are differentiated: what PyTorch's own operations give.

The tests of the kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from test_norms import GROUPS, HALF, LAYOUTS, near, normal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from consilience import rng
from consilience.core.network import Network, staged
from consilience.core.task import cross_entropy
from consilience.kernels import group_norm, group_norm_twice
from consilience.kernels.derivatives import differentiable_twice
from consilience.layers import conv_twice, norms
from consilience.layers.bfloat16 import without_bias
from consilience.layers.stages import Chain
from consilience.models import make
from kernel_device import DEVICE, INTERPRETED, needs_cuda, needs_kernels

NARROW = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# convolutions

HOW: dict[str, tuple[Any, ...]] = {"3×3": ((1, 1), (1, 1), (1, 1), 1), "strided, dilated, grouped": ((2, 1), (1, 0), (1, 2), 2)}


def convolution(how: tuple[Any, ...]) -> tuple[Any, tuple[Tensor, Tensor]]:
    x, weight = normal((3, 4, 7, 6), "x", torch.float64), normal((6, 4 // how[3], 3, 2), "weight", torch.float64)
    ours = lambda x, w: conv_twice._Convolution.apply(conv_twice._within(x), conv_twice._within(w), how)
    return ours, (x.requires_grad_(), weight.requires_grad_())


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_a_convolutions_derivatives(how: tuple[Any, ...]) -> None:
    """The first and the second against differences; the third against PyTorch's."""
    ours, inputs = convolution(how)
    assert torch.equal(ours(*inputs), torch.conv2d(*inputs, None, *how))
    assert torch.autograd.gradcheck(ours, inputs)
    assert torch.autograd.gradgradcheck(ours, inputs)
    thirds = []
    for conv in (ours, lambda x, w: torch.conv2d(x, w, None, *how)):
        first = torch.autograd.grad(conv(*inputs).pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, create_graph=True)
        thirds.append(torch.autograd.grad(sum(g.square().sum() for g in second), inputs))
    for mine, theirs in zip(*thirds):
        torch.testing.assert_close(mine, theirs)


class _Passes(TorchDispatchMode):
    """Which convolutions run, by the size of their kernels, and which gradients of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.append(tuple(args[1].shape[2:]))
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append("".join(what for what, asked in zip(("maps", "weights"), args[10]) if asked))
        return func(*args, **(kwargs or {}))


def test_a_slope_takes_six_passes() -> None:
    """Forward, the slope; through the slope's way the gradient of what came to it and of the weights, and then those of the forward pass.
    None is a convolution by a kernel as large as a map.
    """
    ours, (x, weight) = convolution(HOW["3×3"])
    before = x * 1.0                                # maps that lead to more than the weights do
    with _Passes() as passes:
        y = ours(before, weight)
        slope, = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        torch.autograd.grad(slope.square().sum() + y.sum(), [x, weight])
    assert passes.seen == [(3, 2), "maps", (3, 2), "weights", "mapsweights"]
    with _Passes() as passes:
        slope, = torch.autograd.grad(ours(x, weight).pow(3).sum(), x, create_graph=True)
        torch.autograd.grad(slope.square().sum(), weight)
    assert passes.seen == [(3, 2), "maps", (3, 2), "weights", "weights"]                  # nobody asks for the input's gradient


def test_a_frozen_convolution() -> None:
    ours, (x, weight) = convolution(HOW["3×3"])
    slope, = torch.autograd.grad(ours(x, weight.detach()).pow(3).sum(), x, create_graph=True)
    theirs, = torch.autograd.grad(torch.conv2d(x, weight.detach(), None, *HOW["3×3"]).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(*(torch.autograd.grad(s.square().sum(), x)[0] for s in (slope, theirs)))


# which layers go together

def fused(monkeypatch: pytest.MonkeyPatch, fits: bool = True) -> list[str]:
    """Pretend that the maps lie on a GPU; what was asked for, which PyTorch's operations compute."""
    asked: list[str] = []

    def relu_norm(norm: nn.GroupNorm, x: Tensor, before: Tensor | None = None) -> Tensor:
        asked.append("relu+norm" if before is None else "bias+relu+norm")
        return norm(F.relu(x if before is None else x + before[:, None, None]))
    monkeypatch.setattr(group_norm, "usable", lambda norm, x: fits)
    monkeypatch.setattr(group_norm, "relu_norm", Mock(side_effect=AssertionError))
    monkeypatch.setattr(group_norm_twice, "relu_norm", relu_norm)
    monkeypatch.setattr(conv_twice, "usable", lambda conv, x: True)
    own = conv_twice.without_bias
    monkeypatch.setattr(conv_twice, "without_bias", lambda conv, x: asked.append("conv") or own(conv, x))
    return asked


def chain() -> Chain:
    return Chain(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.GroupNorm(3, 6), nn.BatchNorm2d(6), nn.ReLU(),
                 nn.Conv2d(6, 4, 1, bias=False), nn.ReLU(), nn.GroupNorm(2, 4))


@pytest.mark.parametrize("fits", [True, False])
def test_what_goes_together(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    layers, x = chain(), normal((4, 3, 5, 5), "x")
    theirs, asked = nn.Sequential(*layers)(x), fused(monkeypatch, fits)
    with differentiable_twice():
        torch.testing.assert_close(layers(x), theirs)
    assert asked == (["conv", "bias+relu+norm", "relu+norm", "conv", "relu+norm"] if fits else ["conv", "conv"])


@pytest.mark.parametrize(("place", "left"), [(0, ["relu+norm", "relu+norm"]), (1, ["conv", "relu+norm"]), (2, ["conv"])])
def test_a_layer_that_somebody_listens_to_runs_by_itself(monkeypatch: pytest.MonkeyPatch, place: int, left: list[str]) -> None:
    """So does a ReLU that works in place on what it was shown."""
    layers, x, asked, heard = chain()[:5], normal((4, 3, 5, 5), "x"), fused(monkeypatch), []
    layers[place].register_forward_hook(lambda *_: heard.append(place))
    with differentiable_twice():
        layers(x)
    assert (asked, heard) == (left, [place])


def test_nothing_goes_together_inside_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = chain().eval(), normal((2, 4, 3, 5, 5), "x")
    theirs, asked = torch.vmap(nn.Sequential(*layers))(x), fused(monkeypatch)
    with differentiable_twice():
        torch.testing.assert_close(torch.vmap(layers)(x), theirs)
        torch.vmap(lambda t: norms.relu_norm(layers[2], t))(torch.ones(2, 4, 6, 3, 3))
    assert not asked


def test_what_stays_with_pytorchs_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal((4, 3, 5, 5), "x")
    assert not conv_twice.usable(nn.Conv2d(3, 4, 3), x)                      # in the memory of the host
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    assert conv_twice.usable(nn.Conv2d(3, 4, 3, padding=1), x)
    assert not conv_twice.usable(nn.Conv2d(3, 4, 3, padding="same"), x)
    assert not conv_twice.usable(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), x)
    folded = nn.Conv2d(3, 4, 3, stride=2, padding=1)                          # in bfloat16 it would be
    assert (conv_twice.usable(folded, x), conv_twice.usable(folded, torch.zeros(4, 3, 6, 6))) == (True, False)


def test_convolutions_before_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in VGG11; one that somebody listens to is PyTorch's."""
    layers = Chain(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4))
    x = normal((4, 3, 6, 6), "x")
    theirs, asked, heard = nn.Sequential(*layers)(x), fused(monkeypatch), []
    with differentiable_twice():
        torch.testing.assert_close(layers(x), theirs)
        assert asked == ["conv", "conv"]
        layers[0].register_forward_hook(lambda *_: heard.append(0))
        torch.testing.assert_close(layers(x), theirs)
    assert (asked, heard) == (["conv"] * 3, [0])


@pytest.mark.parametrize("half", [False, True])
def test_a_network_has_the_same_slopes(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    """As with PyTorch's convolutions. In bfloat16 also where the weights are laid ready, which they are from the second pass on, and of a
    kernel larger than its map."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 6, 5, stride=3, padding=2), nn.ReLU(),
              nn.GroupNorm(2, 6), nn.Conv2d(6, 8, 7, padding=3), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3)]
    params = dict(nn.Sequential(*layers).named_parameters())
    x, y, slopes = normal((5, 3, 6, 6), "x").requires_grad_(), torch.arange(5) % 3, []
    asked = fused(monkeypatch)
    for theirs in (False, True):
        if theirs:
            monkeypatch.setattr(conv_twice, "without_bias", without_bias)
        network = Network(nn.Sequential(*layers), half=half, twice=True)
        for _ in range(2):
            logits = network.forward({"params": params, "buffers": {}}, x, train=True).logits
            slope, = torch.autograd.grad(cross_entropy(logits, y), x, create_graph=True)
        slopes.append([slope.detach(), *torch.autograd.grad(slope.square().sum(), list(params.values()), materialize_grads=True)])
    assert asked == ["conv", "bias+relu+norm"] * 6 + ["bias+relu+norm"] * 6
    for ours, wanted in zip(*slopes):
        near(ours, wanted.double(), 4 * HALF if half else 1e-5, wanted.shape)


# the kernels

def group_of(channels: int) -> nn.GroupNorm:
    group = nn.GroupNorm(8, channels).to(DEVICE)
    with torch.no_grad():
        group.weight.copy_(rng.uniform(rng.key(1, "weight"), (channels,)) + 0.5)
        group.bias.copy_(normal((channels,), "bias"))
    return group


def maps(shape: tuple[int, ...], dtype: torch.dtype, layout: str, name: str = "x", add: float = 0.0) -> Tensor:
    return (normal(shape, name, dtype, DEVICE) + add).contiguous(memory_format=LAYOUTS[layout])


def exact_gradients(group: nn.GroupNorm, entered: Tensor, g: Tensor, u: Tensor) -> list[Tensor]:
    """∂L/∂g, ∂L/∂x and ∂L/∂γ of L = Σu·∂x in float64, and what the bias before gets."""
    wide, exact, g = entered.double().requires_grad_(), nn.GroupNorm(8, group.num_channels).to(DEVICE).double(), g.double().requires_grad_()
    exact.load_state_dict(group.state_dict())
    dx, = torch.autograd.grad(exact(F.relu(wide)), wide, g, create_graph=True)
    dg, back, dweight = torch.autograd.grad(dx, [g, wide, exact.weight], u.double())
    return [dg, back, dweight, back.sum((0, 2, 3))]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", GROUPS, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", NARROW.values(), ids=list(NARROW))
@pytest.mark.parametrize("biased", [False, True])
def test_second_derivatives(shape: tuple[int, ...], layout: str, dtype: torch.dtype, biased: bool) -> None:
    needs_kernels()
    group, x = group_of(shape[1]), maps(shape, dtype, layout, add=0.3).requires_grad_()
    before = normal((shape[1],), "before", dtype, DEVICE).requires_grad_() if biased else None
    y = group_norm_twice.relu_norm(group, x, before)
    assert torch.equal(y, group_norm.relu_norm(group, x, before))
    g, u = maps(shape, y.dtype, layout, "g").requires_grad_(), maps(shape, dtype, layout, "u")
    dx, = torch.autograd.grad(y, x, g, create_graph=True)
    assert torch.equal(dx, torch.autograd.grad(group_norm.relu_norm(group, x, before), x, g)[0])
    grads = torch.autograd.grad(dx, [g, x, group.weight, *([] if before is None else [before])], u)
    entered = x.detach() if before is None else (x + before[:, None, None]).detach()
    narrow = dtype == torch.bfloat16
    alike = 4 * HALF if narrow and biased and INTERPRETED else 1e-5                        # it cuts off where PyTorch rounds what enters
    for what, ours, theirs in zip(("dg", "dx", "dweight", "dbefore"), grads, exact_gradients(group, entered, g.detach(), u), strict=False):
        rounded = narrow and (what in ("dx", "dbefore") or (what == "dg" and g.dtype == dtype))
        near(ours, theirs, max(alike, 2 * HALF if what == "dbefore" else HALF) if rounded else alike, what)
    assert [t.dtype for t in grads] == [g.dtype, dtype, torch.float32, *([dtype] if biased else [])]
    assert grads[0].stride() == grads[1].stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=list(NARROW))
def test_what_arrives_may_be_narrow_or_one_number_for_a_channel(dtype: torch.dtype, spread: bool, layout: str) -> None:
    """As after an average over positions."""
    needs_kernels()
    shape = GROUPS[2]
    group, x, u = group_of(shape[1]), maps(shape, torch.float32, layout, add=0.3), maps(shape, dtype, layout, "u")
    g = maps((*shape[:2], 1, 1), dtype, layout, "g").expand(shape) if spread else maps(shape, dtype, layout, "g")
    r = F.relu(x).reshape(len(x), 8, -1)
    mean, std = r.mean(2), (r.var(2, unbiased=False) + group.eps).rsqrt()
    grads = group_norm_twice._by_kernels(u, g, x, None, group.weight.detach(), mean, std, 8)
    dg, dx, dweight, _ = exact_gradients(group, x, g, u)
    near(grads[0], dg, 1e-5 if dtype == torch.float32 else HALF, "dg")
    near(grads[1], dx, 1e-5, "dx")
    near(grads[3], dweight, 1e-5, "dweight")
    assert grads[0].dtype == dtype


def penalised(group: Any, x: Tensor, before: Tensor, ours: bool, maps_alone: bool, times: int) -> list[Tensor]:
    """The gradients of a penalty on the gradients of all that has one, or of the maps, taken once more or twice."""
    y = group_norm_twice.relu_norm(group, x, before) if ours else group(F.relu(x + before[:, None, None]))
    trained = [x] if maps_alone else [x, before, group.weight, group.bias]
    grads = torch.autograd.grad(y.pow(3).sum(), trained, create_graph=True)
    for _ in range(times - 1):
        grads = torch.autograd.grad(sum(g.square().mean() for g in grads), trained, create_graph=True)
    return [g.detach() for g in torch.autograd.grad(sum(g.square().mean() for g in grads), trained)]


@pytest.mark.gpu
@pytest.mark.parametrize(("maps_alone", "times"), [(False, 1), (False, 2), (True, 2)])
def test_penalties_on_gradients_of_weights_and_third_derivatives(maps_alone: bool, times: int) -> None:
    """Neither has kernels; PyTorch's operations take over."""
    needs_kernels()
    group, exact = group_of(24), group_of(24).double()
    x = maps((5, 24, 5, 4), torch.float32, "contiguous", add=0.3).requires_grad_()
    before = normal((24,), "before", device=DEVICE).requires_grad_()
    ours = penalised(group, x, before, True, maps_alone, times)
    theirs = penalised(exact, x.detach().double().requires_grad_(), before.detach().double().requires_grad_(), False, maps_alone, times)
    for what, mine, other in zip(("dx", "dbefore", "dweight", "dbias"), ours, theirs):
        near(mine, other, 1e-3, what)


@pytest.mark.gpu
def test_what_does_not_lie_side_by_side_has_second_derivatives_too() -> None:
    needs_kernels()
    group, whole = group_of(24), normal((5, 24, 5, 8), "x", device=DEVICE).requires_grad_()
    x = whole[..., ::2]
    assert not x.is_contiguous()
    g, u = maps((5, 24, 5, 4), torch.float32, "contiguous", "g"), maps((5, 24, 5, 4), torch.float32, "contiguous", "u")
    dx, = torch.autograd.grad(group_norm_twice.relu_norm(group, x), x, g, create_graph=True)
    back, = torch.autograd.grad(dx, whole, u)
    near(back[..., ::2], exact_gradients(group, x.detach(), g, u)[1], 1e-5, "dx")


# FedMix's step

def slopes_of(module: nn.Module, half: bool, x: Tensor) -> dict[str, Tensor]:
    """As FedMix has them: its loss's slope at the input along x̄, and the gradient of both."""
    params = dict(module.named_parameters())
    network, model = Network(staged(module), half=half, twice=True), {"params": params, "buffers": dict(module.named_buffers())}
    x, along = x.detach().requires_grad_(), normal(tuple(x.shape), "mean", device=x.device.type)
    for _ in range(2):                              # in bfloat16 weights are laid ready from the second pass on
        logits = network.forward(model, x, train=True).logits
        own = cross_entropy(logits, torch.arange(len(x), device=x.device) % 10)
        slope, = torch.autograd.grad(own, x, create_graph=True)
        grads = torch.autograd.grad(own + (slope * along).sum(), list(params.values()))
    return {"logits": logits.detach(), "slope": slope.detach(), **dict(zip(params, grads))}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("name", "sample", "norms"), [("mnist_cnn", (1, 28, 28), 4), ("vgg11", (3, 32, 32), 0)])
def test_a_model_with_the_kernels_has_the_slopes_it_has_without(monkeypatch: pytest.MonkeyPatch, name: str, sample: tuple[int, ...],
                                                                norms: int, half: bool, layout: str) -> None:
    """In bfloat16 as near to those of float32 as PyTorch's are: both round, and a ReLU that then takes its other side has another slope."""
    needs_cuda()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = normal((16, *sample), "x", device="cuda").contiguous(memory_format=LAYOUTS[layout])
    launched = Mock(side_effect=group_norm_twice._by_kernels)
    monkeypatch.setattr(group_norm_twice, "_by_kernels", launched)
    seen = []
    for kernels, narrow in ((True, half), (False, half), (False, False)):
        if not kernels:
            monkeypatch.setattr(group_norm, "usable", lambda norm, x: False)
            monkeypatch.setattr(conv_twice, "usable", lambda conv, x: False)
        module = make(name, sample=sample, classes=10, key=rng.key(0, "m")).module.cuda().to(memory_format=LAYOUTS[layout])
        seen.append(slopes_of(module, narrow, x))
    assert launched.call_count == 2 * norms                   # in both passes
    ours, theirs, exact = seen
    for key, wanted in exact.items():              # changes of 3e-7 behind every norm flip ReLUs: gradients move by 0.5 % then
        assert (ours[key] - wanted).norm() <= 1.5 * (theirs[key] - wanted).norm() + 0.02 * wanted.norm(), key


@pytest.mark.gpu
def test_slopes_on_a_gpu_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cuda()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = lambda: make("mnist_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "m")).module
    x = normal((16, 1, 28, 28), "x")
    theirs, ours = slopes_of(module(), False, x), slopes_of(module().cuda(), False, x.cuda())
    for key, wanted in theirs.items():
        assert (ours[key].cpu() - wanted).norm() <= 0.02 * wanted.norm(), key
