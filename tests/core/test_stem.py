"""A first convolution in bfloat16 by kernels of our own gives what the layer gives under autocast, but for the order of sums.

The kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.core import _stem_cuda
from kernel_device import COMPILED, DEVICE, INTERPRETED, needs_cuda, needs_kernels

ROUNDING = 2.0**-7 if INTERPRETED else 2.0**-8              # to bfloat16; the interpreter cuts off
# samples, channels, height, width; filters, side, step, padding
CASES = {"imagenet": ((64, 3, 32, 32), (64, 7, 2, 3)), "cifar": ((16, 3, 32, 32), (64, 3, 1, 1)), "grey": ((5, 1, 9, 7), (24, 5, 1, 2)),
         "four": ((3, 4, 10, 11), (40, 3, 2, 1)), "bare": ((2, 2, 8, 8), (16, 3, 3, 0)), "many filters": ((2, 3, 6, 6), (128, 3, 1, 1))}
if INTERPRETED:
    CASES |= {"imagenet": ((3, 3, 32, 32), (64, 7, 2, 3)), "cifar": ((2, 3, 16, 16), (64, 3, 1, 1))}


@pytest.fixture(autouse=True)
def _products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and _stem_cuda.triton is not None:
        monkeypatch.setattr(_stem_cuda, "PRODUCT", _stem_cuda.tl.float32)


def layer_and_images(case: str, dtype: torch.dtype) -> tuple[nn.Conv2d, Tensor, Tensor]:
    shape, (filters, side, step, pad) = CASES[case]
    conv = nn.Conv2d(shape[1], filters, side, step, pad, bias=False)
    weight = rng.normal(rng.key(0, "w"), tuple(conv.weight.shape)).bfloat16().to(DEVICE).contiguous(memory_format=torch.channels_last)
    x = rng.normal(rng.key(0, "x"), shape).bfloat16().to(dtype).to(DEVICE).contiguous(memory_format=torch.channels_last)
    return conv, x, weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_maps_and_gradient(case: str, dtype: torch.dtype) -> None:
    """Against float32 arithmetic on the same numbers: sums of products of bfloat16 are nearly exact, and rounded once at the end."""
    needs_kernels()
    conv, x, weight = layer_and_images(case, dtype)
    ours, theirs = weight.clone().requires_grad_(), weight.float().requires_grad_()
    y = _stem_cuda.convolve(conv, x, ours)
    with torch.backends.cudnn.flags(allow_tf32=False):
        wanted = F.conv2d(x.float(), theirs, None, conv.stride, conv.padding)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), wanted, rtol=ROUNDING, atol=1e-3)
    g = rng.normal(rng.key(0, "g"), tuple(wanted.shape)).bfloat16().to(DEVICE)
    (mine,) = torch.autograd.grad(y, ours, g)
    with torch.backends.cudnn.flags(allow_tf32=False):
        (other,) = torch.autograd.grad(wanted, theirs, g.float())
    assert mine.stride() == weight.stride()
    torch.testing.assert_close(mine.float(), other, rtol=ROUNDING, atol=1e-2)


@pytest.mark.gpu
def test_a_sum_by_hand() -> None:
    """Ones everywhere, 3 channels, 3 × 3: the middle of a map sees 27 of them, an edge 18, a corner 12. One filter's weight meets 4 × 4
    positions of 2 samples where it is in the middle, 3 × 4 at an edge and 3 × 3 in a corner."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
    x = torch.ones(2, 3, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(16, 3, 3, 3, device=DEVICE, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = _stem_cuda.convolve(conv, x, weight)
    assert y[1, 5].tolist() == [[12.0, 18.0, 18.0, 12.0], [18.0, 27.0, 27.0, 18.0], [18.0, 27.0, 27.0, 18.0], [12.0, 18.0, 18.0, 12.0]]
    (back,) = torch.autograd.grad(y.sum(), weight)
    assert back[3, 2].tolist() == [[18.0, 24.0, 18.0], [24.0, 32.0, 24.0], [18.0, 24.0, 18.0]]


class OnGpu:
    """As much of images on a GPU as is looked at."""

    is_cuda, dtype, requires_grad = True, torch.float32, False

    def __init__(self, *shape: int, **more: object) -> None:
        self.shape = torch.Size(shape)
        self.__dict__.update(more)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self, memory_format: torch.memory_format) -> bool:
        return memory_format is torch.channels_last


CONV = nn.Conv2d(3, 64, 7, 2, 3)


@pytest.mark.parametrize(("conv", "x", "fits"), [
    (CONV, OnGpu(8, 3, 32, 32), True), (CONV, OnGpu(8, 3, 32, 32, requires_grad=True), False), (CONV, OnGpu(3, 32, 32), False),
    (CONV, OnGpu(8, 3, 32, 32, is_cuda=False), False), (CONV, OnGpu(8, 3, 32, 32, dtype=torch.float64), False),
    (CONV, OnGpu(8, 4, 32, 32), False), (nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), OnGpu(8, 3, 32, 32), False),
    (nn.Conv2d(3, 64, 11, 4), OnGpu(8, 3, 64, 64), False), (nn.Conv2d(16, 64, 3), OnGpu(8, 16, 32, 32), False),
    (nn.Conv2d(3, 256, 3), OnGpu(8, 3, 32, 32), False), (nn.Conv2d(3, 6, 3, groups=3), OnGpu(8, 3, 32, 32), False),
    (nn.Conv2d(3, 8, 3, dilation=2), OnGpu(8, 3, 32, 32), False), (nn.Conv2d(3, 8, (3, 5)), OnGpu(8, 3, 32, 32), False),
    (nn.Conv2d(3, 8, 3, padding="same"), OnGpu(8, 3, 32, 32), False),
])
def test_what_the_kernels_take(conv: nn.Conv2d, x: Tensor, fits: bool) -> None:
    weight = conv.weight.detach().bfloat16().contiguous(memory_format=torch.channels_last)
    assert _stem_cuda.usable(conv, x, weight) is (fits and _stem_cuda.triton is not None)
    assert not _stem_cuda.usable(conv, x, weight.float())


@pytest.mark.gpu
def test_a_model_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cuda()
    from consilience.core.network import Network
    from consilience.models import make
    module = make("resnet18", sample=(3, 32, 32), classes=10, key=rng.key(0, "m")).module.to("cuda", memory_format=torch.channels_last)
    network = Network(module, half=True)
    model = {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    x = rng.normal(rng.key(1), (8, 3, 32, 32)).to("cuda").contiguous(memory_format=torch.channels_last)
    network.forward(model, x)                               # learns which layers run
    used = []
    convolve = _stem_cuda.convolve
    monkeypatch.setattr(_stem_cuda, "convolve", lambda *given: used.append(1) or convolve(*given))
    ours = network.forward(model, x).logits
    assert used == [1]
    monkeypatch.setattr(_stem_cuda, "usable", lambda *given: False)
    torch.testing.assert_close(ours, network.forward(model, x).logits, rtol=0.05, atol=0.05)
