"""The first convolution of a model in bfloat16, of few products, gives what PyTorch's gives.

The tests of the kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.channels_last import turned
from consilience.core.network import Network, staged
from consilience.errors import ConfigError
from consilience.kernels import stem
from consilience.layers import bfloat16
from consilience.models import make
from kernel_device import COMPILED, DEVICE, INTERPRETED, needs_cuda, needs_kernels

ONCE = 2.0**-7 if INTERPRETED else 2.0**-8                  # one rounding to bfloat16; the interpreter cuts off
# picture, channels that come out, side, stride, padding: FedBR's CNN, VGG11 and ResNet-18, then odd ones
FORMS = [((6, 1, 28, 28), 64, 3, 1, 1), ((3, 3, 32, 32), 64, 3, 1, 1), ((2, 1, 9, 7), 5, 5, 2, 2), ((3, 2, 5, 6), 70, 4, 1, 0),
         ((1, 7, 4, 4), 3, 2, 3, 1), ((5, 1, 3, 3), 16, 3, 1, 0), ((2, 4, 6, 5), 24, 1, 1, 0)]
if not INTERPRETED:
    FORMS += [((64, 1, 28, 28), 64, 3, 1, 1), ((1000, 1, 28, 28), 64, 3, 1, 1), ((32, 3, 32, 32), 128, 3, 1, 1)]


@pytest.fixture(autouse=True)
def products_that_the_interpreter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stem, "WIDE", INTERPRETED)


def normal(shape: tuple[int, ...], name: str) -> Tensor:
    return rng.normal(rng.key(0, name), shape).to(DEVICE)


def near(ours: Tensor, theirs: Tensor, share: float) -> None:
    if not COMPILED:
        assert (ours.double() - theirs).abs().max().item() <= share * theirs.abs().max().item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_give_what_the_convolution_gives(form: tuple[tuple[int, ...], int, int, int, int], dtype: torch.dtype) -> None:
    needs_kernels()
    shape, out, side, stride, pad = form
    conv = nn.Conv2d(shape[1], out, side, stride, pad, bias=False).to(DEVICE)
    x = turned(normal(shape, "x").to(dtype))
    for weight in (normal((out, shape[1], side, side), "w").bfloat16(), turned(normal((out, shape[1], side, side), "w").bfloat16())):
        weight.requires_grad_()
        y = stem.convolved(conv, x, weight)
        wide = weight.detach().double().requires_grad_()
        exact = F.conv2d(x.bfloat16().double(), wide, None, stride, pad)
        assert y.shape == exact.shape
        assert y.is_contiguous(memory_format=torch.channels_last)
        near(y, exact, ONCE if not INTERPRETED or dtype == torch.bfloat16 else 4 * ONCE)    # the interpreter cuts off what enters as well
        g = normal(tuple(y.shape), "g").bfloat16()
        back, = torch.autograd.grad(y, weight, g)
        theirs, = torch.autograd.grad(exact, wide, g.double())
        assert back.dtype == torch.bfloat16
        assert back.stride() == weight.stride()
        near(back, theirs, 2 * ONCE)


@pytest.mark.gpu
def test_by_hand() -> None:
    """A 2×2 picture with zeros around, one output of 3×3 ones: every position sees all four numbers, 1 + 2 + 3 + 4. The weight in the
    middle meets each number at its own position: with gradients 1, 0, 0, 2 it gets 1·1 + 2·4; the one to its right what lies to the
    right: 1·2 + 2·0; the one in the last corner 1·4.
    """
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False).to(DEVICE)
    x = turned(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=DEVICE))
    weight = torch.ones(1, 1, 3, 3, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = stem.convolved(conv, x, weight)
    assert y.flatten().tolist() == [10.0] * 4
    back, = torch.autograd.grad(y, weight, torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]], device=DEVICE, dtype=torch.bfloat16))
    assert back[0, 0].tolist() == [[2.0, 4.0, 0.0], [6.0, 9.0, 2.0], [0.0, 3.0, 4.0]]


@pytest.mark.gpu
def test_a_gradient_of_the_gradient_is_refused() -> None:
    needs_kernels()
    conv, weight = nn.Conv2d(1, 2, 3, bias=False).to(DEVICE), normal((2, 1, 3, 3), "w").bfloat16().requires_grad_()
    y = stem.convolved(conv, turned(normal((2, 1, 5, 5), "x")), weight)
    with pytest.raises(ConfigError, match="gradient of a gradient"):
        torch.autograd.grad(y.float().square().sum(), weight, create_graph=True)


class OnGpu:
    """As much of a tensor on a GPU as is looked at."""

    is_cuda, dtype, requires_grad = True, torch.float32, False

    def __init__(self, *shape: int, last: bool = True) -> None:
        _, c, h, w = self.shape = shape
        self.strides = (c * h * w, 1, w * c, c) if last else (c * h * w, h * w, w, 1)

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return 4

    def stride(self, d: int) -> int:
        return self.strides[d]


def test_what_the_kernels_take() -> None:
    takes = lambda conv, x: stem.usable(conv, x)                                            # type: ignore[arg-type]
    conv, x = nn.Conv2d(1, 64, 3, padding=1), OnGpu(64, 1, 28, 28)
    assert takes(conv, x) is (stem.triton is not None)
    assert takes(nn.Conv2d(3, 64, 3, padding=1), OnGpu(64, 3, 32, 32)) is (stem.triton is not None)
    assert not takes(conv, OnGpu(64, 1, 28, 28, last=False))                                      # the maps are not to be turned
    assert not takes(conv, OnGpu(0, 1, 28, 28))
    for other in (nn.Conv2d(1, 64, 3, padding="same"), nn.Conv2d(1, 64, 3, dilation=2), nn.Conv2d(1, 64, 3, padding_mode="reflect"),
                  nn.Conv2d(1, 64, 3, stride=(1, 2)), nn.Conv2d(1, 64, 6), nn.Conv2d(1, 256, 3), nn.Conv2d(1, 64, (3, 30))):
        assert not takes(other, x)
    assert not takes(nn.Conv2d(8, 64, 1), OnGpu(64, 8, 28, 28))                                   # nothing to pad
    assert not takes(nn.Conv2d(2, 64, 3, groups=2), OnGpu(64, 2, 28, 28))
    learns = OnGpu(64, 1, 28, 28)
    learns.requires_grad = True                                                                   # as FedMix asks: no gradient is made
    assert not takes(conv, learns)
    assert not stem.usable(conv, torch.zeros(64, 1, 28, 28))


@pytest.mark.parametrize("bias", [False, True])
def test_half_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """With a bias only where that is added elsewhere."""
    seen = []
    monkeypatch.setattr(bfloat16, "_is_stem", lambda conv, x: True)
    monkeypatch.setattr(stem, "convolved", lambda conv, x, w: seen.append(w.dtype) or F.conv2d(x.bfloat16(), w, None, padding=1))
    conv = nn.Conv2d(1, 4, 3, padding=1, bias=bias)
    together, x = bfloat16.Together(conv), rng.normal(rng.key(0, "x"), (2, 1, 5, 5))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):                                # the first pass shows which layers run
            with together:
                y = conv(x)
        assert seen == ([] if bias else [torch.bfloat16] * 2)
        if bias:
            with together:
                maps, added = bfloat16.without_bias(conv, x)
            assert seen == [torch.bfloat16]
            assert torch.allclose(maps + added[:, None, None], y, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mnist_cnn", "vgg11", "resnet18(stem='3x3')"])
def test_a_model_with_the_kernel_learns_as_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    needs_cuda()
    sample = (1, 28, 28) if name == "mnist_cnn" else (3, 32, 32)
    x, seen, used = turned(normal((16, *sample), "x")), [], []
    monkeypatch.setattr(stem, "convolved", lambda *a, real=stem.convolved: used.append(1) or real(*a))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for kernel, half_way in ((True, True), (False, True), (False, False)):
        if not kernel:
            monkeypatch.setattr(stem, "usable", lambda conv, x: False)
        module = make(name, sample=sample, classes=10, key=rng.key(0, "m")).module.cuda().to(memory_format=torch.channels_last)
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        network, model = Network(staged(module), half=half_way), {"params": params, "buffers": buffers}
        for _ in range(2):
            logits = network.forward(model, x, train=True).logits
        grads = torch.autograd.grad(F.cross_entropy(logits, torch.arange(16, device="cuda") % 10), list(params.values()))
        seen.append({"logits": logits.detach(), **dict(zip(params, grads))})
    assert len(used) == 2
    ours, theirs, exact = seen                            # roundings that fall to the other side flip ReLUs: both are some way off
    for key, right in exact.items():
        off, usual = ((t[key].float() - right).norm() for t in (ours, theirs))
        assert off <= 1.5 * usual + 0.02 * right.norm() + 1e-4, key
