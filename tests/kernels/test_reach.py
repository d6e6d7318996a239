"""What of a kernel meets the map: convolutions without the rest give the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from consilience import rng
from consilience.kernels.reach import Reach, Span, reach
from consilience.models import make


def conv(kernel: int, padding: int, stride: int = 1, dilation: int = 1, **more: object) -> nn.Conv2d:
    return nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=False, **more).double()      # type: ignore[arg-type]


def test_the_middle_alone_meets_a_single_position() -> None:
    """Output 0 looks at positions −1, 0 and 1 of a map that has position 0: the kernel's place 1, without padding."""
    assert reach(conv(3, 1), 1, 1) == Reach(Span(1, 2, 0), Span(1, 2, 0))


def test_stride_two_on_two_positions() -> None:
    """One output, at −1, 0 and 1 of a map with 0 and 1: the kernel's places 1 and 2. Along the other side, of four positions, the outputs
    look at −1 … 1 and 1 … 3: all three places."""
    assert reach(conv(3, 1, 2), 2, 4) == Reach(Span(1, 3, 0), Span(0, 3, 1))


@pytest.mark.parametrize("kept", [conv(3, 1, padding_mode="circular"), conv(3, 0), conv(1, 0)])
def test_where_all_of_it_counts(kept: nn.Conv2d) -> None:
    assert reach(kept, 3, 3) is None
    assert reach(nn.Conv2d(1, 1, 3, padding="same"), 1, 1) is None


def test_two_positions_and_stride_one_need_every_place() -> None:
    assert reach(conv(3, 1), 2, 2) is None


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7))
def test_the_rest_sees_padding_alone(high: int, wide: int, padding: int, stride: int, dilation: int, kernel: int) -> None:
    assume(min(high, wide) + 2 * padding >= dilation * (kernel - 1) + 1)
    layer = conv(kernel, padding, stride, dilation)
    part = reach(layer, high, wide)
    x = rng.normal(rng.key(0, "x"), (2, 2, high, wide)).double().requires_grad_()
    whole = layer(x)
    if part is None:
        return
    weight = layer.weight.detach().requires_grad_()
    cut = F.conv2d(x, part.of(weight), None, layer.stride, part.padding, layer.dilation)
    torch.testing.assert_close(cut, whole)
    ours, theirs = (torch.autograd.grad(out.square().sum(), [x, w]) for out, w in ((cut, weight), (layer(x), layer.weight)))
    torch.testing.assert_close(ours, theirs)                           # zeros out of reach on both sides
    assert part.of(weight).numel() < weight.numel()


def test_most_weights_of_resnet18_see_nothing_on_small_images() -> None:
    """With ImageNet's stem 32 × 32 images are 1 × 1 from layer 4 on: three convolutions of 512 × 512 × 9 use one place of nine, that of
    256 × 512 × 9 before them four of nine. 3·512²·8 + 256·512·5 = 6,946,816 of 11,181,642 weights."""
    module = make("resnet18", sample=(3, 32, 32), classes=10, key=rng.key(0, "m")).module
    unseen, sizes = 0, {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(lambda m, given, name=name: sizes.update({name: given[0].shape[2:]}))
    module.eval()(torch.zeros(1, 3, 32, 32))
    for name, size in sizes.items():
        layer = module.get_submodule(name)
        part = reach(layer, *size)
        unseen += 0 if part is None else layer.weight.numel() - part.of(layer.weight).numel()
    assert unseen == 6_946_816
    assert sum(p.numel() for p in module.parameters()) == 11_181_642
