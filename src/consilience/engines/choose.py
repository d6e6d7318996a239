"""`--engine auto`: which engine runs, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.federation import Federation
from ..errors import ConfigError, unknown
from .hardware import usable_cores
from .sequential import Sequential
from .workers import Workers

NAMES = ("auto", "sequential", "workers", "slots")
WORTH_STARTING = 10.0           # seconds of training below which starting processes does not pay


@dataclass(frozen=True)
class Choice:
    """An engine, its reason, and how it uses the machine."""

    name: str
    why: str
    factory: Callable[..., Any]
    processes: int = 1
    threads: int = 1            # of each process

    def settle(self, fed: Federation) -> None:
        """Make the federation use this engine. Threads are part of the result: they decide in which order sums are added."""
        torch.set_num_threads(self.threads)
        fed.engine = self.factory(fed.program, fed.make_slot)

    def record(self, fed: Federation) -> dict[str, Any]:
        """What a run's record says of where it ran. `notes` grow while it runs."""
        return {"engine": self.name, "why": self.why, "device": str(fed.device), "processes": self.processes, "threads": self.threads,
                "layout": fed.policy.layout, "precision": fed.policy.precision, "notes": list(getattr(fed.engine, "notes", []))}


def choose(asked: str, fed: Federation, seconds: float | None = None, *, workers: int | None = None, cores: int | None = None) -> Choice:
    """The engine for a federation. `seconds`: how long one thread would train in the whole run, where that is known.

    On a CPU the choice changes no number: both engines work with one thread per process, unless all samples are pooled.
    """
    if asked not in NAMES:
        raise unknown("engine", asked, NAMES)
    cores = cores or usable_cores()
    on_gpu = fed.device.type == "cuda"
    if asked in ("workers", "slots") and on_gpu != (asked == "slots"):
        other = "slots needs a GPU: set device=cuda" if asked == "slots" else "workers are CPU processes: set device=cpu"
        raise ConfigError(f"The 'engine' option of the run does not fit device {str(fed.device)!r}; {other}, or use engine=auto.")
    if asked == "slots" or (asked == "auto" and on_gpu):
        from .slots import Slots
        return Choice("slots", "asked for" if asked == "slots" else f"{torch.cuda.get_device_name(fed.device)} is there", Slots,
                      threads=torch.get_num_threads())
    many = min(workers or cores, fed.policy.cohort_size(fed.size))
    if asked == "workers":
        return Choice("workers", "asked for", Workers.of(many), many)
    if asked == "sequential":
        return Choice("sequential", "asked for", Sequential)
    if many == 1:
        why = "this process may use one core" if cores == 1 else "one client trains in a round"
        return Choice("sequential", why, Sequential, threads=cores if fed.size == 1 else 1)
    if seconds is not None and seconds < WORTH_STARTING:
        return Choice("sequential", f"all training takes about {seconds:.1f} s, less than starting workers is worth", Sequential)
    return Choice("workers", f"{many} cores and a CPU", Workers.of(many), many)
