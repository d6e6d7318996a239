"""What a run will need, said before it starts: memory, disk, time. Refused with advice when it cannot fit."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import tree
from ..core import recall
from ..core.federation import Federation
from ..core.store import MemoryStore, StoreFactory
from ..errors import ConfigError
from ..memory import file_of, roomy_folder
from .hardware import available_memory, free_disk
from .rehearse import who_trains, work_of
from .store import DiskStore

PROCESS = (400 if torch.version.cuda or torch.version.hip else 300) * 2**20   # a process with PyTorch; its libraries' files not counted
CHECKPOINTS = 2                 # kept at a time
STATES_SHARE = 0.25             # of the free memory that clients' states may fill before they go to disk,
STATES_ROUNDS = 10              # the rounds whose clients' states may stay in memory,
STATES_SMALL = 64 * 2**20       # the bytes that may in any case,
STATES_LISTED = 10_000          # and the clients
CHECKPOINT_ROUNDS = 3           # from one to the next, where rounds are fast
PROBE_STEPS = 3


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. Memory is the host's; what a GPU's slots take is measured, and the slots engine makes do with what there is."""

    memory: Mapping[str, int] = field(default_factory=dict)       # what for -> bytes
    disk: Mapping[str, int] = field(default_factory=dict)
    steps: float = 0.0                                            # of all clients in a round, on average
    seconds: float | None = None                                  # of a round's training, with all processes
    held: int = 0                                                 # bytes of the memory that are in use already
    on_gpu: int = 0                                               # bytes of a GPU's memory, samples and slots

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def line(self) -> str:
        """One line for the user."""
        when = "" if self.seconds is None else f", about {_span(self.seconds)} of training a round"
        there = f"{_bytes(self.on_gpu)} of the GPU's, " if self.on_gpu else ""
        return f"needs about {_bytes(self.memory_bytes)} of memory, {there}{_bytes(self.disk_bytes)} of disk{when}"

    def record(self) -> dict[str, object]:
        return {"memory_bytes": self.memory_bytes, "gpu_bytes": self.on_gpu, "disk_bytes": self.disk_bytes,
                "seconds_per_round": self.seconds, "steps_per_round": self.steps}


def steps_per_round(fed: Federation) -> float:
    """Steps of all clients in a round, on average over cohorts."""
    if fed.pooled:
        mean = float(fed.samples.longest(fed.phases))
    else:
        sizes, counts = fed.population.table.sizes.unique(return_counts=True)
        total = 0.0
        for n, count in zip(sizes.tolist(), counts.tolist()):
            total += count * fed.samples.steps_for(fed.samples.rows.left(n), fed.phases)
        mean = total / fed.size
    return fed.policy.cohort_size(fed.size) * mean


def time_client(fed: Federation) -> tuple[float, float]:
    """Seconds of one step on one thread, and of all else that a client's visit takes: state in, state out."""
    work = work_of(fed, next(who_trains(fed)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        slot = fed.make_slot(work)
        seconds: list[float] = []
        moves: list[float] = []
        for _ in range(2):                         # the first makes the slot
            start = time.perf_counter()
            work.load(slot)
            moves.append(time.perf_counter() - start)
        for phase, sizes in work.schedule:
            fed.program.begin(slot, phase)
            for size in sizes[: PROBE_STEPS if not seconds else 1]:
                start = time.perf_counter()
                with torch.enable_grad():
                    fed.program.step(slot, phase, size)
                seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        with torch.no_grad():
            tree.clone({"slot": slot.written(), "state": fed.clients.fresh.tensors})         # what comes out of a visit is copied
        return min(seconds), min(moves) + 2 * (time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)


def _in_memory(*tensors: Tensor) -> int:
    """Bytes of tensors that are not mapped from files."""
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu" and file_of(t) is None)


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
             step_seconds: float | None = None, visit_seconds: float = 0.0, on_gpu: int = 0) -> Estimate:
    """For a federation as it stands, before its first round. `workers`: the processes are on this machine. `twins`: devices that share
    the clients; on a CPU they share the samples too. `kept`: the run has a folder. Visits count in full, for the training process
    takes part in each.
    """
    model, state = tree.count_bytes(fed.model), tree.count_bytes(fed.clients.fresh.tensors)
    server = model + tree.count_bytes(fed.shared) + tree.count_bytes(fed.server)
    data = _in_memory(fed.population.x, fed.population.y)
    cohort = min(fed.policy.cohort_size(fed.size), fed.size)
    states, on_disk = states_bytes(fed, rounds), isinstance(fed.clients, DiskStore)
    answers = 3 * recall.bytes_of(fed)         # those in the slot, and the next client's in pieces and joined
    memory = {"process": PROCESS, "data": data, "server": 4 * server, "round": cohort * 2 * (model + state),
              "step": 8 * model + state + answers}
    if workers:
        memory["workers"] = processes * (PROCESS + 12 * model + 6 * state + answers) + data
    if twins and fed.device.type == "cpu":
        memory["twins"] = twins * (12 * model + 2 * state + answers)
    if not on_disk:
        memory["states"] = states
    disk: dict[str, int] = {}
    if on_disk:
        # a checkpoint holds on to what changed after it, over a few rounds, and best models to what changed since
        older = min(states, CHECKPOINT_ROUNDS * cohort * state)
        disk["states"] = states + cohort * state + (CHECKPOINTS * older + (states if fed.personal else 0) if kept else 0)
    if kept:
        disk["checkpoints"] = (CHECKPOINTS + 1) * (server + (0 if on_disk else states))
        fresh = fed.clients.fresh.tensors
        served = {p.name: fresh["kept"].get(p.name, {}) for p in fed.method.using("personalise")}
        own = tree.count_bytes({"personal": fresh["personal"], "local": fresh["local"], "kept": served}) if fed.personal else 0
        disk["models"] = 2 * (model + min(fed.size, visits(fed, rounds)) * own)
    steps = steps_per_round(fed)
    seconds = None if step_seconds is None else steps * step_seconds / min(max(processes, twins), cohort) + cohort * visit_seconds
    return Estimate(memory, disk, steps, seconds, PROCESS + data, on_gpu)


def refuse_samples_without_room(x: Tensor, y: Tensor, device: torch.device) -> None:
    """A ConfigError with advice where a GPU cannot hold the samples, which lie there from the first round to the last."""
    if device.type != "cuda":
        return
    need, free = sum(t.numel() * t.element_size() for t in (x, y) if not t.is_cuda), _free_on(device)
    if need > free:
        gc.collect()                    # an earlier run of this process may still lie there, though nobody knows it any more
        free = _free_on(device)
    if need > free:
        raise ConfigError(f"The samples take {_bytes(need)} and the GPU has {_bytes(free)} free. Use a part of them, a GPU with more "
                          "memory, or device=cpu, where map_data=true reads them from a file as they are needed.")


def _free_on(device: torch.device) -> int:
    """Bytes of a GPU's memory that nobody has, and those that PyTorch keeps from earlier use for the next one."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def refuse_what_cannot_fit(needs: Estimate, folder: Path | None = None) -> None:
    """A ConfigError with advice where the machine has less than the run needs."""
    free = available_memory()
    if free is not None and needs.memory_bytes - needs.held > free:
        most = max(needs.memory.keys() - {"process"} or needs.memory, key=lambda k: needs.memory[k])
        advice = {"data": "map them from a file (map_data=true)", "states": "keep clients' states on disk (store=disk)",
                  "workers": "use fewer workers or engine=sequential", "round": "choose fewer clients a round (participation)",
                  "server": "use a smaller model or another method", "step": "use a smaller model"}.get(most, "use a larger machine")
        raise ConfigError(f"The run needs about {_bytes(needs.memory_bytes)} of memory and {_bytes(free + needs.held)} are free. Most of "
                          f"it, {_bytes(needs.memory[most])}, is for {most}: {advice}.")
    where = folder or Path(roomy_folder() or tempfile.gettempdir())        # without a folder states go to a temporary file
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
