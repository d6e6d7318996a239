"""The fused CUDA kernels of FedFA's layer give what its tensor operations give, forward and backward.

They need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from consilience import rng
from consilience.core.step_view import Unfolded
from consilience.parts import _ffa_cuda
from consilience.parts.ffa import Ffa

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if _ffa_cuda.triton is None:
        pytest.skip("Triton is not installed")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sharing", ["per_channel", "scalar", "direct", "none", "random"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_kernels_equal_tensor_operations(monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, sharing: str,
                                         unbiased: bool) -> None:
    coins = set()
    for seed in range(6):
        draw = lambda name, *shape, s=seed: rng.uniform(rng.key(s, name), shape).to(DEVICE)
        x = (rng.normal(rng.key(seed, "x"), (10, 6, 5, 4)) * 2 + 1).to(DEVICE).contiguous(memory_format=layout).requires_grad_()
        slot_key, counter = rng.key(seed, "slot").to(DEVICE), torch.tensor([seed % 3]).to(DEVICE)
        number = rng.number("batch", "ffa", "q")
        step_key = rng.fold(slot_key, counter[0])
        key = rng.fold(step_key, number)
        unfolded = Unfolded(slot_key, counter, number) if seed % 2 else Unfolded(step_key, None, number)      # the same key
        view = SimpleNamespace(train=True, key=lambda _, k=key: k, unfolded=lambda _, u=unfolded: u,
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
    if DEVICE != "cuda":
        pytest.skip("no CUDA device")
    assert _ffa_cuda.usable(torch.zeros(10, 4, 28, 28, device="cuda"))
    assert not _ffa_cuda.usable(torch.zeros(64, 4, 56, 56, device="cuda"))
