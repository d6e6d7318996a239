"""The fused CUDA kernels of FedFA's layer give what its tensor operations give, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from consilience import rng
from consilience.parts import _ffa_cuda
from consilience.parts.ffa import Ffa

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sharing", ["per_channel", "scalar", "direct", "none", "random"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_kernels_equal_tensor_operations(monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, sharing: str,
                                         unbiased: bool) -> None:
    coins = set()
    for seed in range(6):
        draw = lambda name, *shape, s=seed: rng.uniform(rng.key(s, name), shape).cuda()
        x = (rng.normal(rng.key(seed, "x"), (10, 6, 5, 4)) * 2 + 1).cuda().contiguous(memory_format=layout).requires_grad_()
        view = SimpleNamespace(train=True, key=lambda *words, s=seed: rng.key(s, *words).cuda(),
                               shared={"variance": {"q": {"mean": draw("a", 6), "std": draw("b", 6)}}},
                               scratch={"stats": {"q": {"mean": draw("c", 6), "std": draw("d", 6)}}, "left": {"q": draw("e")}})
        seen = []
        for fused in (False, True):
            monkeypatch.setattr(_ffa_cuda, "usable", lambda _, yes=fused: yes)
            y, notes = Ffa(p=0.5, sharing=sharing, unbiased=unbiased).tap(view, "q", x)      # type: ignore[arg-type]
            (grad,) = torch.autograd.grad((y * draw("w", *x.shape)).sum(), x)
            seen.append((y.detach(), grad, *notes["stats"].values(), notes["left"]))
        for ours, theirs in zip(*seen):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        coins.add(torch.equal(seen[1][0], x.detach()))
    assert coins == {True, False}


def test_large_maps_take_the_tensor_operations() -> None:
    assert _ffa_cuda.usable(torch.zeros(10, 4, 28, 28, device="cuda"))
    assert not _ffa_cuda.usable(torch.zeros(64, 4, 56, 56, device="cuda"))
