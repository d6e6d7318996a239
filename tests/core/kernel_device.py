"""Where tests of kernels run: on a CUDA device, or with TRITON_INTERPRET=1 in Triton's interpreter on the host (`make test-kernels`)."""

from __future__ import annotations

import os

import pytest
import torch

from consilience.core import _norms_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def needs_kernels() -> None:
    if _norms_cuda.triton is None:
        pytest.skip("Triton is not installed")
    if not INTERPRETED:
        needs_cuda()


def needs_cuda() -> None:
    """For what the interpreter does not show: cuDNN, CUDA graphs, a choice that looks at the device."""
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("no CUDA device")
