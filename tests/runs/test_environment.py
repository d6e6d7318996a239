"""What a run on a GPU records beside a CPU's."""

from __future__ import annotations

import pytest
import torch

from consilience.runs.environment import describe_environment


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_recorded_on_a_gpu(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    assert describe_environment(torch.device("cuda"))["tf32"] == {"cudnn": allowed, "matmul": False}
    assert describe_environment(torch.device("cpu"))["tf32"] is None
