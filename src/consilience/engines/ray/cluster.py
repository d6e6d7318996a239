"""A Ray cluster as we use it: found or started, what it has, and left again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from ...errors import ConfigError
from ..hardware import usable_cores

ANSWERS_WITHIN = 10.0                   # seconds
# Of a Ray of our own: nothing is reported to anyone, and workers see the GPUs that Ray gives them.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


@dataclass(frozen=True)
class Plan:
    """So many workers, each with one GPU or one core."""

    workers: int
    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass
class Cluster:
    """A connection. A Ray that we started ends with `close`, and at the latest with this process."""

    address: str | None                 # None: Ray runs on this machine for this process alone
    ours: bool                          # we connected, so we disconnect

    @property
    def embedded(self) -> bool:
        return self.address is None

    @classmethod
    def connect(cls, address: str | None = None, cores: int | None = None) -> Cluster:
        """To the address given, else to RAY_ADDRESS, else to a Ray of this machine's own with so many cores."""
        address = address or os.environ.get("RAY_ADDRESS") or None
        if ray.is_initialized():        # the caller has connected already, and will disconnect
            return cls(address, ours=False)
        _speak_on_stderr()
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        with warnings.catch_warnings(), _same_sigterm():
            warnings.simplefilter("ignore")
            if address is not None:
                _join(address, common)
            else:
                with _environment(_QUIET | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}):
                    ray.init(address="local", num_cpus=cores or usable_cores(), include_dashboard=False, **common)
        return cls(address, ours=True)

    def has(self, what: str) -> int:
        """How many CPUs or GPUs there are, on all machines together."""
        return int(ray.cluster_resources().get(what, 0))

    @property
    def machines(self) -> int:
        return sum(bool(node["Alive"]) for node in ray.nodes())

    def plan(self, most: int, gpus: bool | None, workers: int | None = None) -> Plan:
        """Workers for at most so many pieces of work at once. `gpus` of None: where there are any."""
        if gpus and not self.has("GPU"):
            raise ConfigError(f"The run asks for a GPU, but {self.described()} has none. Use device=cpu or device=auto.")
        device = "cuda" if self.has("GPU") and gpus is not False else "cpu"
        there = workers or self.has("GPU" if device == "cuda" else "CPU")
        return Plan(max(1, min(there, most)), device)

    def described(self) -> str:
        where = "a Ray of this machine's own" if self.embedded else f"the Ray cluster at {self.address}"
        count = lambda n, what: f"{n} {what}{'' if n == 1 else 's'}"
        has = [count(self.has("CPU"), "core"), *([count(self.has("GPU"), "GPU")] if self.has("GPU") else [])]
        return f"{where} ({count(self.machines, 'machine')}, {', '.join(has)})"

    def close(self) -> None:
        if self.ours and ray.is_initialized():
            ray.shutdown()


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself and exits with 1. Who handled it before, as our command line does, handles it after: leaving it
    disconnects too, and what Ray started ends with the process. Where nobody did, Ray's own is better than none.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def _speak_on_stderr() -> None:
    """Ray tells of lost workers on standard output, which is for results alone. There is no setting for that, so its printer is told."""
    module: Any = sys.modules.get("ray._private.worker")
    printer = getattr(module, "print_to_stdstream", None)
    if printer is not None and not hasattr(printer, "on_stderr"):
        def on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return printer({**data, "is_err": True}, *args, **kwargs)
        on_stderr.on_stderr = True                                # type: ignore[attr-defined]
        module.print_to_stdstream = on_stderr


def _join(address: str, common: dict[str, Any]) -> None:
    try:
        if address.startswith("ray://"):
            raise ValueError("a proxy's address; start the run on a machine of the cluster and give host:port, or auto")
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal():                            # Ray itself would go on trying for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN).close()
        ray.init(address=address, **common)
    except (OSError, RuntimeError, ValueError, OverflowError, AssertionError) as error:      # ConnectionError and TimeoutError are OSErrors
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(f"No Ray cluster can be used at {address!r} (from --ray or RAY_ADDRESS): {reason}. Start one with "
                          "`ray start --head`, or leave the address out to use this machine alone.") from None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for processes started meanwhile. What the user has set stays, but for the path, which they must share with us."""
    before = {k: os.environ.get(k) for k in values}
    os.environ.update({k: v for k, v in values.items() if before[k] is None or k == "PYTHONPATH"})
    try:
        yield
    finally:
        for k, v in before.items():
            if v is None:
                os.environ.pop(k, None)
            else:
                os.environ[k] = v
