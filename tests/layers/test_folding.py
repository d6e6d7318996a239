"""Strided convolutions of few channels, with squares of pixels for channels: the same sums in another order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from consilience import rng
from consilience.core.network import Network
from consilience.layers import bfloat16
from consilience.layers.folding import Fold, fold_of, folded
from kernel_device import needs_cuda

FOLDED = [  # kernel, padding, height, width, channels
    (7, 3, 32, 32, 3), (7, 3, 2, 6, 3), (3, 1, 8, 8, 1), (3, 0, 8, 10, 4), (5, 2, 6, 6, 3), (4, 1, 8, 8, 2), (2, 0, 8, 8, 3),
    (1, 0, 8, 8, 3), (3, 2, 8, 8, 3), ((7, 3), (3, 1), 8, 8, 3),
]


def test_one_kernel_by_hand() -> None:
    """A 2 × 2 image, a 3 × 3 kernel, padding 1, stride 2: one position, at which the kernel's middle is on the first pixel, so that
    it meets the four pixels with its lower right square: 5·1 + 6·2 + 8·3 + 9·4 = 77.
    Folded, the kernel begins with a row and a column of zeros and has two squares a side; the image is the second of them.
    """
    conv = nn.Conv2d(1, 1, 3, 2, 1, bias=False)
    kernel = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    fold = fold_of(conv, 2, 2)
    assert fold == (Fold(before=1, squares=2, front=1, back=0),) * 2
    assert folded(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), kernel, None, fold, torch.float32).tolist() == [[[[77.0]]]]


@pytest.mark.parametrize(("kernel", "padding", "height", "width", "channels"), FOLDED)
def test_maps_and_all_gradients_are_the_convolutions(kernel: int, padding: int, height: int, width: int, channels: int) -> None:
    conv = nn.Conv2d(channels, 5, kernel, 2, padding).double()
    x = rng.normal(rng.key(0, "x"), (3, channels, height, width)).double().requires_grad_()
    before = x.detach().clone()
    fold = fold_of(conv, height, width)
    assert fold is not None
    ours, theirs = folded(x, conv.weight, conv.bias, fold, torch.double), conv(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    leaves = [x, conv.weight, conv.bias]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (ours, theirs))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("conv", "height"), [
    (nn.Conv2d(8, 4, 3, 2, 1), 8),                                      # channels enough
    (nn.Conv2d(3, 4, 3, 1, 1), 8),                                      # no stride
    (nn.Conv2d(3, 4, 3, 3, 1), 8),
    (nn.Conv2d(3, 3, 3, 2, 1, groups=3), 8),
    (nn.Conv2d(3, 4, 3, 2, 2, dilation=2), 8),
    (nn.Conv2d(3, 4, 3, 2, 1, padding_mode="circular"), 8),
    (nn.Conv2d(3, 4, 3, 1, "same"), 8),
    (nn.Conv2d(3, 4, 3, 2, 1), 7),                                      # half a square is left over
    (nn.Conv2d(3, 4, 9, 2, 0), 8),                                      # no position at all
])
def test_others_are_left_alone(conv: nn.Conv2d, height: int) -> None:
    assert fold_of(conv, height, 8) is None


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


def passes(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Logits and gradients of the second pass, in which weights are cast together."""
    network = Network(copy.deepcopy(module), half=True)
    model = {"params": {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()}, "buffers": {}}
    network.forward(model, x)
    logits = network.forward(model, x, train=True).logits
    return logits, *torch.autograd.grad(logits.square().sum(), [*model["params"].values()])


def stem_and_pictures(device: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Stem().to(memory_format=torch.channels_last).to(device)        # type: ignore[call-overload]
    return module, rng.normal(rng.key(0, "x"), (8, 3, 16, 16)).contiguous(memory_format=torch.channels_last).to(device)


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.01 * b.abs().max().item())


def test_a_pass_in_bfloat16_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the cast weight is folded, and its gradient comes back to where it was before."""
    module, x = stem_and_pictures("cpu")
    theirs, shapes = passes(module, x), []
    monkeypatch.setattr(bfloat16, "_folds", lambda conv, input: True)
    monkeypatch.setattr(bfloat16, "folded", lambda *given, real=bfloat16.folded: shapes.append(given[1].dtype) or real(*given))
    close(passes(module, x), theirs)
    assert shapes == [torch.float32, torch.bfloat16]            # before it is known which layers run, and after


@pytest.mark.gpu
def test_a_gpu_folds_maps_with_their_channels_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cuda()
    module, x = stem_and_pictures("cuda")
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(bfloat16, "folded", lambda *given, real=bfloat16.folded: seen.append(given[0].shape) or real(*given))
    ours = passes(module, x)
    assert len(seen) == 2
    passes(module.to(memory_format=torch.contiguous_format), x.contiguous())     # type: ignore[call-overload]
    assert len(seen) == 2
    monkeypatch.setattr(bfloat16, "_folds", lambda conv, input: False)
    close(ours, passes(module.to(memory_format=torch.channels_last), x))          # type: ignore[call-overload]
