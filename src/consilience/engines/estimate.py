"""What a run will need, said before it starts: memory, disk, time. Refused with advice when it cannot fit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import tree
from ..core.client import LocalWork
from ..core.federation import Federation
from ..core.store import MemoryStore, StoreFactory
from ..errors import ConfigError
from .hardware import available_memory, free_disk
from .store import DiskStore

PROCESS = 300 * 2**20           # a Python process with PyTorch imported
CHECKPOINTS = 2                 # kept at a time
STATES_SHARE = 0.25             # of the free memory that clients' states may fill before they go to disk,
STATES_ROUNDS = 10              # the rounds whose clients' states may stay in memory,
STATES_SMALL = 64 * 2**20       # the bytes that may in any case,
STATES_LISTED = 10_000          # and the clients
PROBE_STEPS = 3


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. Memory is the host's; a GPU's is found out by the slots engine itself."""

    memory: Mapping[str, int] = field(default_factory=dict)       # what for -> bytes
    disk: Mapping[str, int] = field(default_factory=dict)
    steps: float = 0.0                                            # of all clients in a round, on average
    seconds: float | None = None                                  # of a round's training, with all processes

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def line(self) -> str:
        """One line for the user."""
        when = "" if self.seconds is None else f", about {_span(self.seconds)} of training a round"
        return f"needs about {_bytes(self.memory_bytes)} of memory, {_bytes(self.disk_bytes)} of disk{when}"

    def record(self) -> dict[str, object]:
        return {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes, "seconds_per_round": self.seconds,
                "steps_per_round": self.steps}


def steps_per_round(fed: Federation) -> float:
    """Steps of all clients in a round, on average over cohorts."""
    if fed.pooled:
        mean = float(fed.samples.longest(fed.phases))
    else:
        sizes, counts = fed.population.table.sizes.unique(return_counts=True)
        total = 0.0
        for n, count in zip(sizes.tolist(), counts.tolist()):
            held = int(n * fed.samples.rows.share)
            total += count * fed.samples.steps_for(n - held, fed.phases)
        mean = total / fed.size
    return fed.policy.cohort_size(fed.size) * mean


def time_step(fed: Federation) -> float:
    """Seconds of one step on one thread, measured on a slot of its own; the federation is not touched."""
    number = next(i for i in range(fed.size) if fed.samples.schedule(i, fed.phases))
    with torch.no_grad():
        work = LocalWork(fed, number, fed.client(number), [number],
                         {p.name: p.deliver(fed.serve(p, "deliver", [number]), number) for p in fed.method.using("deliver")})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        slot = fed.make_slot(work)
        work.load(slot)
        seconds: list[float] = []
        for phase, sizes in work.schedule:
            fed.program.begin(slot, phase)
            for size in sizes[: PROBE_STEPS if not seconds else 1]:
                start = time.perf_counter()
                with torch.enable_grad():
                    fed.program.step(slot, phase, size)
                seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(seconds)


def _in_memory(*tensors: Tensor) -> int:
    """Bytes of tensors that are not mapped from files."""
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu" and t.untyped_storage().filename is None)


def visits(fed: Federation, rounds: int) -> int:
    """Clients that will have taken part at least once, on average: N (1 − (1 − k/N)^rounds); all where parts prepare."""
    if fed.method.using("prepare"):
        return fed.size
    share = fed.policy.cohort_size(fed.size) / fed.size
    return min(fed.size, round(fed.size * (1 - (1 - share) ** rounds)) + 1)


def choose_store(fed: Federation, rounds: int, folder: Path | None = None, asked: str = "auto") -> StoreFactory:
    """Memory where all states are few, else a file in the folder (or one without a name).

    Few: no more than ten rounds' clients hold, or little in any case, and no large share of the free memory; so memory grows with
    the clients of a round and not with the population. And no more clients than a checkpoint may list one by one.
    """
    states, free = states_bytes(fed, rounds), available_memory()
    few = max(STATES_SMALL, STATES_ROUNDS * fed.policy.cohort_size(fed.size) * tree.count_bytes(fed.clients.fresh.tensors))
    fits = states <= few and (free is None or states <= STATES_SHARE * free) and visits(fed, rounds) <= STATES_LISTED
    return MemoryStore if asked == "memory" or (asked == "auto" and fits) else DiskStore.inside(folder)


def states_bytes(fed: Federation, rounds: int) -> int:
    return visits(fed, rounds) * tree.count_bytes(fed.clients.fresh.tensors)


def estimate(fed: Federation, rounds: int, *, processes: int = 1, workers: bool = False, twins: int = 0, kept: bool = False,
             step_seconds: float | None = None) -> Estimate:
    """For a federation as it stands, before its first round. `workers`: the processes are on this machine. `twins`: devices that share
    the clients; on a CPU they share the samples too. `kept`: the run has a folder.
    """
    model, state = tree.count_bytes(fed.model), tree.count_bytes(fed.clients.fresh.tensors)
    server = model + tree.count_bytes(fed.shared) + tree.count_bytes(fed.server)
    data = _in_memory(fed.population.x, fed.population.y)
    cohort = min(fed.policy.cohort_size(fed.size), fed.size)
    states, on_disk = states_bytes(fed, rounds), isinstance(fed.clients, DiskStore)
    memory = {"process": PROCESS, "data": data, "server": 4 * server, "round": cohort * 2 * (model + state),
              "step": 8 * model + state}
    if workers:
        memory["workers"] = processes * (PROCESS + 12 * model + 6 * state) + data
    if twins and fed.device.type == "cpu":
        memory["twins"] = twins * (12 * model + 2 * state)
    if not on_disk:
        memory["states"] = states
    disk: dict[str, int] = {}
    if on_disk:
        disk["states"] = states + (cohort * state * 2 if kept else cohort * state)
    if kept:
        disk["checkpoints"] = (CHECKPOINTS + 1) * (server + (0 if on_disk else states))
        disk["models"] = 2 * (model + (fed.size * state if fed.personal else 0))
    steps = steps_per_round(fed)
    seconds = None if step_seconds is None else steps * step_seconds / min(max(processes, twins), cohort)
    return Estimate(memory, disk, steps, seconds)


def refuse_what_cannot_fit(needs: Estimate, folder: Path | None = None) -> None:
    """A ConfigError with advice where the machine has less than the run needs."""
    free = available_memory()
    if free is not None and needs.memory_bytes > free:
        most = max(needs.memory, key=lambda k: needs.memory[k])
        advice = {"data": "map the data from a file (a tensor made by torch.from_file)", "states": "keep clients' states on disk",
                  "workers": "use fewer workers or engine=sequential", "round": "choose fewer clients a round (participation)",
                  "server": "use a smaller model or another method", "step": "use a smaller model"}.get(most, "use a larger machine")
        raise ConfigError(f"The run needs about {_bytes(needs.memory_bytes)} of memory and {_bytes(free)} are free. Most of it, "
                          f"{_bytes(needs.memory[most])}, is for {most}: {advice}.")
    where = folder or Path.cwd()
    if needs.disk_bytes and needs.disk_bytes > free_disk(where):
        most = max(needs.disk, key=lambda k: needs.disk[k])
        raise ConfigError(f"The run needs about {_bytes(needs.disk_bytes)} of disk and {_bytes(free_disk(where))} are free in "
                          f"{str(where)!r}; {_bytes(needs.disk[most])} are for {most}. Choose another folder, or fewer clients.")


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _span(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
