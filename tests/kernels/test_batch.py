"""The kernels that draw numbers and make batches give what tensor operations give, number for number.

They need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from consilience import rng
from consilience.data import transforms
from consilience.data.dataset import Dataset
from consilience.kernels import batch, hashing
from kernel_device import DEVICE, needs_kernels

pytestmark = pytest.mark.gpu
TRANSFORMS = ["none", "normalise", "crop+flip+normalise", "crop(pad=2, mode=reflect)+normalise", "flip(p=0.3)", "crop(pad=1)"]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    needs_kernels()


def there(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def test_keys() -> None:
    keys = rng.keys(7, "a", each=range(3))
    for key in keys:
        for number in (0, 3, rng.number("a word"), torch.tensor(5), torch.tensor(2**40)):
            ours = hashing.fold(key.to(DEVICE), number.to(DEVICE) if isinstance(number, Tensor) else number)
            assert torch.equal(ours.cpu(), rng.fold(key, number))


@pytest.mark.parametrize("n", [1, 5, 1024, 1500])
def test_draws(n: int) -> None:
    keys = rng.keys(7, "a", each=range(3))
    for uniform in (True, False):
        wanted = torch.stack([rng.uniform(k, (n,)) if uniform else rng.bits(k, n) for k in keys])
        assert torch.equal(hashing.draw(keys.to(DEVICE), n, uniform).cpu(), wanted)
        assert torch.equal(hashing.draw(keys[1].to(DEVICE), n, uniform).cpu(), wanted[1])


def pictures(channels: int, whole: bool) -> Dataset:
    x = rng.integers(rng.key(0, "x"), 256, (12, channels, 6, 5))
    x = x.to(torch.uint8) if whole else x.float() / 100
    return Dataset("made", x, torch.arange(12) % 4, 4, mean=(0.1, 0.2, 0.3)[:channels], std=(0.5, 0.6, 0.7)[:channels])


@pytest.mark.parametrize("text", TRANSFORMS)
@pytest.mark.parametrize(("channels", "whole"), [(3, True), (1, True), (3, False)])
def test_transforms(text: str, channels: int, whole: bool) -> None:
    data, key = pictures(channels, whole), rng.key(3, "batch")
    transform = transforms.make(text, data)
    for own in (key, None):                                     # without a key nothing is drawn, as in evaluation
        what = transform.fused(own is not None)
        assert what is not None
        wanted, _ = transform(data.x, data.y, own)
        word = rng.key(key, transforms.WORD) if own is not None else key
        ours = batch.run(*there(data.x, word), what)
        torch.testing.assert_close(ours.cpu(), wanted.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("text", TRANSFORMS)
@pytest.mark.parametrize("channels", [3, 1])
def test_batches(text: str, channels: int, last: bool) -> None:
    """Rows by the counter, their labels, and the transform with the step's key."""
    data, key = pictures(channels, True), rng.key(2, "slot")
    transform = transforms.make(text, data)
    index, what = rng.integers(rng.key(1), len(data.x), (4, 6)), transform.fused(True)
    assert what is not None
    for step in (3, 1):
        x, y, order, counter, seed = there(data.x, data.y, index, torch.tensor([step]), key)
        source = batch.Source(y, order, counter, rng.number(transforms.WORD))
        out, labels = batch.gather(x, 5, seed, what, source, last)
        rows = index[step][:5]
        wanted, wanted_labels = transform(data.x[rows], data.y[rows], rng.key(rng.fold(key, step), "transform"))
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(labels.cpu(), wanted_labels.long())
        assert not last or out.is_contiguous(memory_format=torch.channels_last)
