"""How it shows that a GPU's memory ran out, and what a user can do about it."""

from __future__ import annotations

import torch

from ..errors import ConfigError

# What the driver and the libraries say when they find no memory for themselves; PyTorch's own class of error is for its allocator alone.
NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
             "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate")


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out; ending a capture that broke for that reason may raise an error of its own on top."""
    if error is None:
        return False
    if isinstance(error, torch.cuda.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in NO_MEMORY)):
        return True
    return out_of_memory(error.__cause__) or out_of_memory(error.__context__)


def too_little(said: str) -> ConfigError:
    return ConfigError(f"The GPU's memory does not suffice to train one client ({said}). Use a smaller batch or eval_batch, fewer "
                       "clients a round (participation), precision=bfloat16, or device=cpu.")
