"""Where a run ran: versions, hardware, state of the source. Recorded beside the results, never part of them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..cuda_start import QUEUES

_PACKAGES = ("consilience", "torch", "numpy", "scipy", "scikit-learn", "safetensors")


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def _git_state() -> dict[str, Any] | None:
    """Commit and whether files were changed, when the package is used from a checkout. Asked once, when the first run of the process
    begins: the code at work was read then, and while a long run goes on others may commit.
    """
    here = Path(__file__).resolve().parent
    try:
        def ask(*args: str) -> str:
            command = ["git", "-C", str(here), *args]
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _tf32() -> dict[str, bool]:
    """Whether products of float32 may be rounded to TF32: in convolutions and recurrent layers by cuDNN, and in other products."""
    def allowed(older: Any, newer: Any) -> bool:
        try:
            return bool(older.allow_tf32)
        except RuntimeError:                          # set by PyTorch's newer interface, of which the older one then says nothing
            return bool(newer.fp32_precision == "tf32")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {"cudnn": allowed(cudnn, getattr(cudnn, "conv", cudnn)), "matmul": allowed(matmul, matmul)}


def describe_environment(device: torch.device) -> dict[str, Any]:
    return {"python": sys.version.split()[0], "platform": platform.platform(), "packages": {p: version_of(p) for p in _PACKAGES},
            "device": str(device), "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "tf32": _tf32() if device.type == "cuda" else None,
            "queues": os.environ.get(QUEUES) if device.type == "cuda" else None, "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
            "git": _git_state()}
