"""`--engine auto`: which engine runs, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.federation import Federation
from ..errors import ConfigError, unknown
from .hardware import usable_cores
from .sequential import Sequential
from .workers import Workers

NAMES = ("auto", "sequential", "workers", "slots", "ray")
WORTH_STARTING = 10.0           # seconds of training below which starting processes does not pay


@dataclass(frozen=True)
class Choice:
    """An engine, its reason, and how it uses the machine."""

    name: str
    why: str
    factory: Callable[..., Any]
    processes: int = 1
    threads: int = 1            # of each process
    devices: tuple[str, ...] = ()                  # where several share the clients
    starts_processes: bool = False                 # on this machine

    @property
    def twins(self) -> int:
        """Second federations that this process holds."""
        return len(self.devices) if self.processes == 1 else 0

    def settle(self, fed: Federation) -> None:
        """Make the federation use this engine. Threads are part of the result: they decide in which order sums are added."""
        torch.set_num_threads(self.threads)
        fed.engine = self.factory(fed.program, fed.make_slot)

    def record(self, fed: Federation) -> dict[str, Any]:
        """What a run's record says of where it ran. `notes` grow while it runs."""
        return {"engine": self.name, "why": self.why, "device": str(fed.device), "devices": list(self.devices) or [str(fed.device)],
                "processes": self.processes, "threads": self.threads, "layout": fed.policy.layout, "precision": fed.policy.precision,
                "notes": list(getattr(fed.engine, "notes", []))}


def choose(asked: str, fed: Federation, seconds: float | None = None, *, workers: int | None = None, cores: int | None = None,
           devices: Sequence[torch.device] = (), cluster: str | None = None, any_device: bool = True) -> Choice:
    """The engine for a federation. `seconds`: how long one thread would train in the whole run, where that is known.

    `devices` of this machine share the clients where there are several; `cluster` is where Ray is found, if it is asked for, and
    `any_device` whether its workers may use GPUs though this process has none.

    On a CPU the choice changes no number: all engines work with one thread per process, unless all samples are pooled.
    """
    if asked not in NAMES:
        raise unknown("engine", asked, NAMES)
    cores = cores or usable_cores()
    on_gpu = fed.device.type == "cuda"
    if asked == "ray":
        return _on_cluster(fed, cluster, on_gpu, any_device, workers, cores)
    if asked in ("workers", "slots") and on_gpu != (asked == "slots"):
        other = "slots needs a GPU: set device=cuda" if asked == "slots" else "workers are CPU processes: set device=cpu"
        raise ConfigError(f"The 'engine' option of the run does not fit device {str(fed.device)!r}; {other}, or use engine=auto.")
    if len(devices) > 1:
        return _on_devices(asked, devices)
    if asked == "slots" or (asked == "auto" and on_gpu):
        from .slots import Slots
        return Choice("slots", "asked for" if asked == "slots" else f"{torch.cuda.get_device_name(fed.device)} is there", Slots,
                      threads=torch.get_num_threads())
    many = min(workers or cores, fed.policy.cohort_size(fed.size))
    if asked == "workers":
        return Choice("workers", "asked for", Workers.of(many), many, starts_processes=True)
    if asked == "sequential":
        return Choice("sequential", "asked for", Sequential)
    if many == 1:
        why = "this process may use one core" if cores == 1 else "one client trains in a round"
        return Choice("sequential", why, Sequential, threads=cores if fed.size == 1 else 1)
    if seconds is not None and seconds < WORTH_STARTING:
        return Choice("sequential", f"all training takes about {seconds:.1f} s, less than starting workers is worth", Sequential)
    return Choice("workers", f"{many} cores and a CPU", Workers.of(many), many, starts_processes=True)


def _on_devices(asked: str, devices: Sequence[torch.device]) -> Choice:
    """The devices' own engine on each of them."""
    from .devices import Devices, local_engine
    local = Sequential if asked == "sequential" else local_engine(devices[0])
    on_gpu = devices[0].type == "cuda"
    return Choice("slots" if local is not Sequential else "sequential", f"{len(devices)} devices share the clients, as asked for",
                  Devices.on(devices, local), threads=torch.get_num_threads() if on_gpu else 1, devices=tuple(map(str, devices)))


def _on_cluster(fed: Federation, address: str | None, on_gpu: bool, any_device: bool, workers: int | None, cores: int) -> Choice:
    """Workers on a Ray cluster; without one, on a Ray of this machine's own."""
    from .ray import Cluster, Ray
    there = Cluster.connect(address, cores)
    plan = there.plan(fed.policy.cohort_size(fed.size), gpus=True if on_gpu else None if any_device else False, workers=workers)
    return Choice("ray", f"asked for; {there.described()}", Ray.on(there, plan), plan.workers, devices=(plan.device,) * plan.workers,
                  starts_processes=there.embedded)
