"""Where tests of kernels run: on a CUDA device; with TRITON_INTERPRET=1 in Triton's interpreter on the host; with the plugin
`kernels_compiled` nowhere, since kernels are compiled and not launched. `make test-kernels` does the last two."""

from __future__ import annotations

import os

import pytest
import torch

from consilience.kernels import batch_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = os.environ.get("COMPILE_KERNELS_FOR") is not None
ON_HOST = INTERPRETED or COMPILED
DEVICE = "cpu" if ON_HOST else "cuda"


def needs_kernels() -> None:
    if batch_norm.triton is None:
        pytest.skip("Triton is not installed")
    if not ON_HOST:
        needs_cuda()


def needs_cuda() -> None:
    """For what the host does not show: cuDNN, CUDA graphs, a choice that looks at the device."""
    if ON_HOST or not torch.cuda.is_available():
        pytest.skip("no CUDA device")
