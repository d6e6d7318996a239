"""The fused CUDA kernels of FedFA's layer give what its tensor operations give, forward and backward.

They need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from consilience import rng
from consilience.core.step_view import Unfolded
from consilience.parts.ffa import Ffa
from consilience.parts.kernels import ffa, ffa_large
from kernel_device import DEVICE, INTERPRETED, needs_kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels() -> None:
    needs_kernels()


# what a map of 10 samples, 6 channels and 20 positions takes: one kernel; three; three whose programs have 16 positions of a channel at a
# time, or 8 of two where the channels lie side by side
WAYS = {"one kernel": {}, "three": {"LARGEST": 0}, "three, in pieces": {"LARGEST": 0, "TILE": 16, "SIDE": 2}}


SHARING = ["per_channel", "scalar", "direct", "none", "random"]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("way", "sharing", "unbiased"), [*(("one kernel", s, u) for s in SHARING for u in (True, False)),
                                                          *(("three", s, s != "none") for s in SHARING),
                                                          ("three, in pieces", "per_channel", True)])
def test_kernels_equal_tensor_operations(monkeypatch: pytest.MonkeyPatch, way: str, layout: torch.memory_format, sharing: str,
                                         unbiased: bool) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(ffa if name == "LARGEST" else ffa_large, name, value)
    coins = set()
    for seed in range(6):
        coins.add(compared(monkeypatch, seed, (10, 6, 5, 4), layout, Ffa(p=0.5, sharing=sharing, unbiased=unbiased)))
    assert coins == {True, False}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bfloat16_is_read_and_written_as_it_is(monkeypatch: pytest.MonkeyPatch, way: str, layout: torch.memory_format) -> None:
    """Tensor operations make the map float32, and what follows a tap makes it bfloat16 again: one rounding, as in the kernels."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(ffa if name == "LARGEST" else ffa_large, name, value)
    for seed in range(4):
        compared(monkeypatch, seed, (10, 6, 5, 4), layout, Ffa(p=0.5), torch.bfloat16)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 70, 4, 3), (2, 1, 60, 100), (3, 33, 4, 1)])
def test_odd_sizes_in_three_kernels(monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, shape: tuple[int, ...]) -> None:
    """Channels that do not fill the last program's share, one channel, and maps that need several tiles or hardly one."""
    monkeypatch.setattr(ffa, "LARGEST", 0)
    compared(monkeypatch, 0, shape, layout, Ffa(p=1.0))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (64, 128, 16, 16), (64, 512, 4, 4), (32, 64, 63, 63), (16, 32, 128, 128)])
def test_sizes_of_the_papers_models(monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, shape: tuple[int, ...]) -> None:
    """The first, the second and the last stage of ResNet-18 on CIFAR-10, the first of AlexNet on Office-Caltech and of U-Net."""
    if INTERPRETED:
        pytest.skip("takes minutes in the interpreter")
    compared(monkeypatch, 1, shape, layout, Ffa(p=1.0))


def compared(monkeypatch: pytest.MonkeyPatch, seed: int, shape: tuple[int, ...], layout: torch.memory_format, part: Ffa,
             dtype: torch.dtype = torch.float32) -> bool:
    """Kernels and tensor operations agree on one map. Returns whether it was left as it is."""
    draw = lambda name, *size: rng.uniform(rng.key(seed, name), size).to(DEVICE)
    channels = shape[1]
    x = (rng.normal(rng.key(seed, "x"), shape) * 2 + 1).to(DEVICE, dtype).contiguous(memory_format=layout).requires_grad_()
    slot_key, counter = rng.key(seed, "slot").to(DEVICE), torch.tensor([seed % 3]).to(DEVICE)
    number = rng.number("batch", "ffa", "q")
    step_key = rng.fold(slot_key, counter[0])
    key = rng.fold(step_key, number)
    unfolded = Unfolded(slot_key, counter, number) if seed % 2 else Unfolded(step_key, None, number)      # the same key
    variance, stats = ({"q": {"mean": draw(a, channels), "std": draw(b, channels)}} for a, b in ("ab", "cd"))
    view = SimpleNamespace(train=True, key=lambda _: key, unfolded=lambda _: unfolded, shared={"variance": variance},
                           scratch={"stats": stats, "left": {"q": draw("e")}})
    seen = []
    for fused in (False, True):
        monkeypatch.setattr(ffa, "usable", lambda _, yes=fused: yes)
        y, notes = part.tap(view, "q", x)      # type: ignore[arg-type]
        assert not fused or y.dtype == dtype
        y = y.to(dtype)
        (grad,) = torch.autograd.grad((y * draw("w", *shape).to(dtype)).sum(), x)
        seen.append((y.detach(), grad, *notes["stats"].values(), notes["left"]))
    for theirs, ours in zip(*seen):
        assert ours.dtype == theirs.dtype
        # a number between two of bfloat16 may go to either where sums differ in their last bits; the interpreter cuts off
        near = {"rtol": 2.0**-7, "atol": 1e-3} if ours.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours, theirs, **near)
    return torch.equal(seen[1][0], x.detach())


def test_which_maps_take_three_kernels() -> None:
    """A program can hold 32,768 numbers: 32 samples of 32 × 32 positions. With channels side by side maps of 65,536 take one."""
    for layout in (torch.contiguous_format, torch.channels_last):
        took = [ffa.in_three(torch.empty(shape, device="meta").contiguous(memory_format=layout))
                for shape in ((33, 4, 32, 32), (32, 2, 32, 32), (32, 4, 32, 32), (64, 512, 4, 4))]
        assert took == [True, False, *[layout is torch.channels_last] * 2]


def test_which_maps_have_kernels() -> None:
    assert not ffa.usable(torch.zeros(10, 4, 28, 28))                     # on a CPU
    if DEVICE != "cuda":
        pytest.skip("no CUDA device")
    assert ffa.usable(torch.zeros(10, 4, 28, 28, device="cuda"))
    assert ffa.usable(torch.zeros(64, 4, 56, 56, device="cuda"))
    assert ffa.usable(torch.zeros(10, 4, 28, 28, device="cuda", dtype=torch.bfloat16))
    assert not ffa.usable(torch.zeros(10, 4, 28, 28, device="cuda", dtype=torch.float64))
    assert not ffa.usable(torch.zeros(5000, 1, 2, 2, device="cuda"))
