"""The end of a step: the loss is noted at the step's place, and the step is counted."""

from __future__ import annotations

import pytest
import torch

from consilience.kernels import record
from kernel_device import DEVICE, ON_HOST, needs_kernels


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_losses_are_noted_in_their_order(kernel: bool) -> None:
    if kernel:
        needs_kernels()
    device = DEVICE if kernel else "cpu"
    losses, counter = torch.zeros(5, device=device), torch.tensor([1], device=device)
    for value in (0.5, 1.5, 2.5):
        loss = torch.tensor(value, device=device)
        if kernel and ON_HOST:                      # `record.record` looks at the device
            record._kernel[(1,)](loss, losses, counter, num_warps=1)
        else:
            record.record(loss, losses, counter)
    assert losses.tolist() == [0, 0.5, 1.5, 2.5, 0]
    assert counter.tolist() == [4]
