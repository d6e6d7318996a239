"""The end of a step: the loss is noted at the step's place, and the step is counted."""

from __future__ import annotations

import pytest
import torch

from consilience.core._record_cuda import record


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_are_noted_in_their_order(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    losses, counter = torch.zeros(5, device=device), torch.tensor([1], device=device)
    for value in (0.5, 1.5, 2.5):
        record(torch.tensor(value, device=device), losses, counter)
    assert losses.tolist() == [0, 0.5, 1.5, 2.5, 0]
    assert counter.tolist() == [4]
