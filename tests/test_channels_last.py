"""Maps with their channels next to each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from consilience.channels_last import fills_memory, is_turned, turned
from consilience.core.memory_layout import lay_out
from consilience.kernels import batch
from consilience.testing import tiny_federation


@pytest.mark.parametrize("channels", [1, 3])
def test_layers_see_it(channels: int) -> None:
    """Also where there is one channel: PyTorch takes such maps for laid out already, and the convolution's result would not be."""
    x = torch.randn(2, channels, 5, 4)
    assert not is_turned(x)
    y = turned(x)
    assert torch.equal(x, y)
    assert y.stride() == (20 * channels, 1, 4 * channels, channels)
    assert is_turned(y)
    assert is_turned(F.conv2d(y, torch.randn(6, channels, 3, 3)))


def test_what_fills_its_memory() -> None:
    maps = torch.randn(2, 3, 5, 4)
    assert all(map(fills_memory, (maps, turned(maps), maps.flatten(), maps[:1], torch.zeros(0))))
    assert not any(map(fills_memory, (maps[:, :2], turned(maps)[:, :2], maps.mT, maps.flatten()[::2], maps[0].transpose(0, 2))))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_samples_of_a_run_have_its_layout(layout: str) -> None:
    """Of one channel, in evaluation and in training."""
    fed = tiny_federation(layout=layout)
    x, _ = fed.samples.inputs(torch.arange(3))
    assert is_turned(x) is is_turned(lay_out(torch.zeros(2, 1, 8, 8), fed.policy)) is (layout == "channels_last")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("last", [True, False])
def test_samples_that_a_gpu_picks_in_one_kernel_have_it_too(monkeypatch: pytest.MonkeyPatch, channels: int, last: bool) -> None:
    """What its kernel writes to; the kernel itself does nothing here."""
    monkeypatch.setattr(batch, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)))
    monkeypatch.setattr(batch, "_kernel", {(1,): lambda *args: None}, raising=False)
    x, plain = torch.zeros(5, channels, 3, 4), batch.Usual(0, False, None, (), ())
    source = batch.Source(torch.zeros(5), torch.arange(5)[None], torch.zeros(1), 0)
    out, _ = batch.gather(x, 2, x, plain, source, last)
    assert out.shape == (2, channels, 3, 4)
    assert is_turned(out) is last
