"""What CUDA reads once, when it starts. The package sets it on import: a run starts CUDA long before it knows its engine.

Work that streams hand over reaches the GPU through hardware queues, and streams that share one wait for each other. CUDA makes eight by
default, and two for a process under the multi-process service, where all processes draw theirs from one stock.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

QUEUES, MOST_QUEUES, FEWEST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32, 4
_SETTINGS = {QUEUES: str(MOST_QUEUES),
             "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}       # one workspace a stream, without which cuBLAS does not repeat its numbers


def set_before_start(environment: MutableMapping[str, str] = os.environ) -> frozenset[str]:
    """Give CUDA the settings that the user has not given. Returns the names of those that were set."""
    ours = frozenset(_SETTINGS) - environment.keys()
    environment.update({name: _SETTINGS[name] for name in ours})
    return ours


def queues_of_each(processes: int) -> int | None:
    """The share of one of several processes on one GPU; None where the user has said how many queues there shall be."""
    return max(FEWEST_QUEUES, MOST_QUEUES // processes) if QUEUES in _OURS else None


_OURS = set_before_start()
