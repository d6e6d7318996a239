"""Convolutions of small maps in bfloat16 by kernels of our own give what PyTorch's give.

The tests of the kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.channels_last import turned
from consilience.errors import ConfigError
from consilience.kernels import small_conv
from consilience.kernels.derivatives import differentiable_twice
from consilience.kernels.small_conv import PASSES, Layer, Tiles, usual_tiles
from consilience.layers import bfloat16
from kernel_device import COMPILED, DEVICE, INTERPRETED, needs_cuda, needs_kernels

# Sums are float32 and products of bfloat16 exact in it, so what counts is one rounding, at most 2⁻⁹ of a number; of the largest number with
# room for the order of sums. The interpreter cuts off: 2⁻⁷ of a number.
ONCE = 2.0**-7 if INTERPRETED else 2.0**-8
# samples, then channels, map, channels that come out, kernel, stride, padding
FORMS = [(3, Layer(16, 5, 4, 32, 3, 3, 1, 1, 1)), (5, Layer(32, 6, 6, 16, 3, 3, 2, 1, 1)), (2, Layer(16, 4, 4, 48, 1, 1, 2, 0, 0)),
         (17, Layer(48, 2, 2, 16, 3, 3, 1, 1, 1)), (4, Layer(16, 2, 2, 80, 2, 2, 2, 0, 0)), (1, Layer(16, 7, 7, 16, 4, 4, 1, 0, 0)),
         (2, Layer(16, 5, 7, 16, 3, 2, 3, 2, 0)), (3, Layer(96, 1, 1, 32, 1, 1, 1, 0, 0)), (2, Layer(16, 3, 3, 16, 1, 1, 1, 2, 2)),
         (2, Layer(16, 4, 5, 16, 4, 4, 1, 3, 3))]
if not INTERPRETED:                                         # ResNet-18 and FedBR's CNN
    FORMS += [(64, Layer(64, 8, 8, 64, 3, 3, 1, 1, 1)), (64, Layer(64, 8, 8, 128, 3, 3, 2, 1, 1)),
              (50, Layer(128, 4, 4, 128, 3, 3, 1, 1, 1)),
              (64, Layer(256, 2, 2, 256, 3, 3, 1, 1, 1)), (64, Layer(512, 1, 1, 512, 1, 1, 1, 0, 0)),
              (64, Layer(16, 19, 19, 64, 4, 4, 1, 0, 0)), (32, Layer(128, 14, 14, 128, 3, 3, 1, 1, 1))]


@pytest.fixture(autouse=True)
def products_that_the_interpreter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_conv, "WIDE", INTERPRETED)


def normal(shape: tuple[int, ...], name: str) -> Tensor:
    return turned(rng.normal(rng.key(0, name), shape).to(DEVICE).bfloat16())


def near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.bfloat16
    if not COMPILED:
        assert (ours.double() - theirs).abs().max().item() <= ONCE * theirs.abs().max().item()


def tensors(n: int, layer: Layer) -> tuple[Tensor, Tensor]:
    return normal((n, layer.c, layer.h, layer.w), "x"), normal((layer.co, layer.c, layer.kh, layer.kw), "w")


def usual(n: int, layer: Layer) -> small_conv.Ways:
    forward, maps, weights = (usual_tiles(way, layer, n) for way in PASSES)
    return forward, maps, weights


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_give_what_the_convolution_gives(form: tuple[int, Layer]) -> None:
    needs_kernels()
    n, layer = form
    (x, weight), ways = tensors(n, layer), usual(n, layer)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    theirs = F.conv2d(exact[0], exact[1], None, layer.stride, (layer.pad_h, layer.pad_w))
    x.requires_grad_()
    weight.requires_grad_()
    y = small_conv.convolved(x, weight, layer, ways)
    assert y.is_contiguous(memory_format=torch.channels_last)
    near(y, theirs)
    g = normal(tuple(y.shape), "g")
    dx, dweight = torch.autograd.grad(y, [x, weight], g)
    dx_too, dweight_too = torch.autograd.grad(theirs, exact, g.double())
    near(dx, dx_too)
    near(dweight, dweight_too)
    assert dx.is_contiguous(memory_format=torch.channels_last)
    assert dweight.stride() == weight.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", dict.fromkeys(layer for _, layer in small_conv.TAKEN), ids=str)
def test_the_tiles_of_the_table_give_what_the_convolution_gives(layer: Layer) -> None:
    """With few samples in the interpreter, and everywhere with some that fill no tile."""
    needs_kernels()
    n = 3 if INTERPRETED else 61
    forward, maps, weights = (small_conv.taken(way, layer, n) for way in PASSES)
    x, weight = tensors(n, layer)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    theirs = F.conv2d(exact[0], exact[1], None, layer.stride, (layer.pad_h, layer.pad_w))
    y = small_conv.convolved(x.requires_grad_(), weight.requires_grad_(), layer, (forward, maps, weights))
    near(y, theirs)
    g = normal(tuple(y.shape), "g")
    for ours, right in zip(torch.autograd.grad(y, [x, weight], g), torch.autograd.grad(theirs, exact, g.double())):
        near(ours, right)


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [1, 2, 5, 16])
def test_pieces_of_the_positions_add_up(pieces: int) -> None:
    """Also where there are more pieces than turns, and the same bits every time."""
    needs_kernels()
    layer = Layer(16, 4, 3, 32, 3, 3, 1, 1, 1)
    x, weight = tensors(20, layer)
    g, tiles = normal((20, 32, 4, 3), "g"), Tiles(16, 16, 16, 4, 2, pieces)
    first, again = (small_conv.weights_gradient(g, x, weight, layer, tiles) for _ in range(2))
    exact = torch.ops.aten.convolution_backward(g.double(), x.double(), weight.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                                                [False, True, False])[1]
    near(first, exact)
    assert COMPILED or torch.equal(first, again)


@pytest.mark.gpu
def test_by_hand() -> None:
    """A 2×2 map 1 2 / 3 4 in the first channel, the rest zero; to the first output a 3×3 kernel of ones from the first channel, with zeros
    around: every position sees 1 + 2 + 3 + 4. With gradients 1, 0, 0, 2 every number gets 1 + 2; the weight in the middle meets each number
    at its own position, 1·1 + 2·4, the one to its right what lies to the right, 1·2, the one in the last corner 1·4.
    """
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    layer = Layer(16, 2, 2, 16, 3, 3, 1, 1, 1)
    shapes = (1, 16, 2, 2), (16, 16, 3, 3), (1, 16, 2, 2)
    x, weight, g = (turned(torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16)) for shape in shapes)
    x[0, 0], weight[0, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1.0
    g[0, 0] = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    x.requires_grad_()
    weight.requires_grad_()
    y = small_conv.convolved(x, weight, layer, usual(1, layer))
    assert y[0, 0].tolist() == [[10.0] * 2] * 2
    assert not y[0, 1:].any()
    dx, dweight = torch.autograd.grad(y, [x, weight], g)
    assert dx[0, 0].tolist() == [[3.0] * 2] * 2
    assert not dx[0, 1:].any()
    assert dweight[0, 0].tolist() == [[2.0, 4.0, 0.0], [6.0, 9.0, 2.0], [0.0, 3.0, 4.0]]
    assert not dweight[1:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kept", range(8))
def test_each_pass_may_be_ours_or_theirs(kept: int) -> None:
    needs_kernels()
    layer = Layer(16, 4, 4, 32, 3, 3, 2, 1, 1)
    forward, maps, weights = (tiles if kept >> i & 1 else None for i, tiles in enumerate(usual(3, layer)))
    x, weight = tensors(3, layer)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    y = small_conv.convolved(x.requires_grad_(), weight.requires_grad_(), layer, (forward, maps, weights))
    theirs = F.conv2d(exact[0], exact[1], None, 2, 1)
    near(y, theirs)
    g = normal(tuple(y.shape), "g")
    for ours, right in zip(torch.autograd.grad(y, [x, weight], g), torch.autograd.grad(theirs, exact, g.double())):
        near(ours, right)


@pytest.mark.gpu
def test_no_gradient_is_made_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels()
    layer, made = Layer(16, 4, 4, 16, 3, 3, 1, 1, 1), []
    for name in ("maps_gradient", "weights_gradient"):
        real = getattr(small_conv, name)
        monkeypatch.setattr(small_conv, name, lambda *a, name=name, real=real: made.append(name) or real(*a))
    x, weight = tensors(2, layer)
    small_conv.convolved(x, weight.requires_grad_(), layer, usual(2, layer)).sum().backward()
    assert made == ["weights_gradient"]
    small_conv.convolved(x.requires_grad_(), weight.detach(), layer, usual(2, layer)).sum().backward()
    assert made[1:] == ["maps_gradient"]


@pytest.mark.gpu
def test_a_gradient_of_the_gradient_is_refused() -> None:
    needs_kernels()
    layer = Layer(16, 4, 4, 16, 3, 3, 1, 1, 1)
    x, weight = tensors(2, layer)
    y = small_conv.convolved(x, weight.requires_grad_(), layer, usual(2, layer))
    with pytest.raises(ConfigError, match="gradient of a gradient"):
        torch.autograd.grad(y.float().square().sum(), weight, create_graph=True)


class OnGpu:
    """As much of a tensor on a GPU as is looked at."""

    is_cuda = True

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return 4


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(x: object, weight: Tensor, stride: tuple[int, int] = (1, 1), padding: object = (1, 1), dilation: tuple[int, int] = (1, 1),
              groups: int = 1) -> bool:
        return small_conv.ways_of(x, weight, stride, padding, dilation, groups) is not None      # type: ignore[arg-type]
    x, weight = OnGpu(64, 64, 8, 8), torch.zeros(64, 64, 3, 3)
    monkeypatch.setattr(small_conv, "TAKEN", {})
    assert not takes(x, weight)
    monkeypatch.setattr(small_conv, "TAKEN", {("weights", Layer(64, 8, 8, 64, 3, 3, 1, 1, 1)): Tiles(64, 64, 64)})
    assert takes(x, weight) is (small_conv.triton is not None)
    assert not takes(OnGpu(64, 64, 4, 4), weight)
    monkeypatch.setattr(small_conv, "taken", lambda way, layer, samples: Tiles(64, 64, 64))
    assert takes(OnGpu(64, 64, 4, 4), weight) is (small_conv.triton is not None)
    assert not takes(OnGpu(64, 24, 8, 8), torch.zeros(64, 24, 3, 3))
    assert not takes(x, torch.zeros(24, 64, 3, 3))
    assert not takes(OnGpu(0, 64, 8, 8), weight)
    assert not takes(OnGpu(1 << 20, 64, 8, 8), weight)
    assert not takes(x, weight, stride=(1, 2))
    assert not takes(x, weight, padding="same")
    assert not takes(x, weight, dilation=(2, 2))
    assert not takes(OnGpu(64, 128, 8, 8), weight, groups=2)
    assert not takes(torch.zeros(64, 64, 8, 8), weight)


def test_where_layers_in_bfloat16_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the kernels: tensors say that they lie on a GPU, autocast that it is on, and Triton that it is there."""
    taken = object()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(bfloat16, "_autocast", lambda input: True)
    monkeypatch.setattr(small_conv, "triton", object())
    monkeypatch.setattr(small_conv, "convolved", lambda *how: taken)

    def ours(x: Tensor, **how: Any) -> object:
        conv = nn.Conv2d(64, 64, 3, padding=1, bias=False, **how).to(memory_format=torch.channels_last)
        return bfloat16._ours(conv, x, conv.weight, conv.padding)
    x = turned(torch.zeros(4, 64, 8, 8))
    assert ours(x) is taken
    assert ours(x, padding_mode="reflect") is None
    assert ours(turned(torch.zeros(257, 64, 8, 8))) is None                            # scoring
    plain = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    assert bfloat16._ours(plain, x.contiguous(), plain.weight, plain.padding) is None
    with differentiable_twice():                                                       # FedMix: they have no second derivative
        assert ours(x) is None
    assert torch.vmap(lambda one: one + (ours(x) is None), randomness="same")(torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("side", [1, 2, 4])
def test_a_layer_in_bfloat16_takes_them_where_the_table_says(monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    """On a map of one position by the middle of its kernel alone."""
    needs_cuda()
    monkeypatch.setattr(small_conv, "taken", usual_tiles)
    used: list[Layer] = []
    monkeypatch.setattr(small_conv, "convolved", lambda *a, real=small_conv.convolved: used.append(a[2]) or real(*a))
    conv = nn.Conv2d(32, 64, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
    x, together = normal((16, 32, side, side), "x"), bfloat16.Together(conv)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):                                # the first pass shows which layers run
            with together:
                y = conv(x)
    kernel = 1 if side == 1 else 3
    assert used == [Layer(32, side, side, 64, kernel, kernel, 1, kernel // 2, kernel // 2)] * 2
    right = F.conv2d(x.double(), conv.weight.bfloat16().double(), None, 1, 1)
    near(y, right)
    back, = torch.autograd.grad(y, conv.weight, torch.ones_like(y))
    theirs = torch.ops.aten.convolution_backward(torch.ones_like(right), x.double(), conv.weight.double(), None, [1, 1], [1, 1], [1, 1],
                                                 False, [0, 0], 1, [False, True, False])[1]
    near(back.bfloat16(), theirs)
