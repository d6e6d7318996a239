"""The plain loops are compared in double precision, where nothing but the rule itself can make a difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from consilience.core import task


@pytest.fixture(autouse=True)
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)        # parts say float() for "the run's numbers"
    monkeypatch.setattr(task.as_probabilities, "__defaults__", (torch.float64,))
    yield
    torch.set_default_dtype(before)
