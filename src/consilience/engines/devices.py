"""Several devices of one machine: a round's clients are shared out among them, and every device works with its own fast engine.

Each device has a twin of the federation (a network, slots, and the samples, once) and a thread. A thread is enough: replaying graphs and
computing let go of the interpreter. Results come back to the first device in the order of the clients, so that sums are the same.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from ..core.client import LocalWork
from ..core.engine import ClientTask, EngineFactory, RoomyEngine, Work
from ..core.federation import Federation
from ..core.slot import Slot
from ..core.step import Program
from ..errors import ConfigError, did_you_mean
from ._twin import STATE, Mirror, build_twin, for_twins, moved, twin_beside
from .sequential import Sequential

MOST = 1024                                                        # devices; more is a slip of the pen
_GPUS = re.compile(r"(?:cuda:)?(\d+)(?:-(\d+))?")
_FORMS = "as in 0-7, 0,2,3, cuda:0,cuda:1, all or cpu,cpu"


# ---- what the user says ----------------------------------------------------------------------------------------------

def parse_devices(text: str) -> tuple[str, ...]:
    """'0-2' → ('cuda:0', 'cuda:1', 'cuda:2'); 'cpu,cpu' and 'all' stand for themselves. Whether they exist is asked later."""
    if text.strip() == "all":
        return ("all",)
    out: list[str] = []
    for item in (word.strip() for word in text.split(",")):
        found = _GPUS.fullmatch(item)
        if found:
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                raise ConfigError(f"The 'devices' option of the run counts upwards: {item!r} should be {last}-{first}.")
            out += [f"cuda:{i}" for i in range(first, min(last, first + MOST) + 1)]
        elif item == "cpu":
            out.append(item)
        else:
            near = did_you_mean(item, ("cpu", "cuda:0", "cuda:1", "all")) if item else ""
            raise ConfigError(f"The 'devices' option of the run names GPUs by number, or cpu, {_FORMS}. Got {text!r} instead.{near}")
    if len(out) > MOST:
        raise ConfigError(f"The 'devices' option of the run names more than {MOST} devices: {text!r}.")
    if len({name.partition(":")[0] for name in out}) > 1:
        raise ConfigError(f"The 'devices' option of the run mixes GPUs and cpu: {text!r}. A client's numbers would depend on where it "
                          "lands; name one kind.")
    return tuple(out)


def existing_devices(text: str) -> tuple[torch.device, ...]:
    """The devices named, all of which this machine has."""
    names, there = parse_devices(text), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if names[0] == "cpu":
        return tuple(torch.device(name) for name in names)
    if not there:
        raise ConfigError(f"The 'devices' option of the run asks for GPUs ({text}), but PyTorch sees none on this machine. Leave it out, "
                          "or use devices=cpu,cpu to share the work out among threads.")
    if names == ("all",):
        return tuple(torch.device("cuda", i) for i in range(there))
    missing = [d.index for d in map(torch.device, names) if (d.index or 0) >= there]
    if missing:
        raise ConfigError(f"The 'devices' option of the run asks for GPU {', '.join(map(str, missing))}, but this machine has "
                          f"{there}: {'0' if there == 1 else f'0-{there - 1}'}. (CUDA_VISIBLE_DEVICES hides what it does not list.)")
    return tuple(map(torch.device, names))


# ---- the engine ------------------------------------------------------------------------------------------------------

def share_out(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Places of the costs for each share: the largest first, each to whoever has least; of equals the first."""
    out: list[list[int]] = [[] for _ in range(shares)]
    load = [0.0] * shares
    for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(shares), key=lambda s: load[s])
        out[least].append(place)
        load[least] += max(costs[place], 1)                        # clients without samples are no reason to use one device alone
    return out


def local_engine(device: torch.device) -> EngineFactory:
    """The fast engine of one device."""
    if device.type != "cuda":
        return Sequential
    from .slots import Slots
    return Slots


class _Stopped(Exception):
    """Nobody waits for this shard any more."""


class _ShardWork(LocalWork):
    """A client's work that is not begun once its shard has been given up."""

    stop: threading.Event

    def load(self, slot: Slot) -> None:
        if self.stop.is_set():
            raise _Stopped
        super().load(slot)


Begin = Callable[[Federation, list[int], threading.Event], Iterator[Any]]


class Devices:
    """The engine. Twins are built with the first work; `close` lets go of them."""

    def __init__(self, program: Program, make_slot: Callable[[Work], Slot], *, devices: Sequence[str | torch.device],
                 local: EngineFactory | None = None) -> None:
        self.devices = tuple(map(_exact, devices))
        self.local = local
        self.here = (local or local_engine(self.devices[0]))(program, make_slot)      # for single pieces of work that a hook asks for
        self.twins: list[Federation] = []
        self._made_of: Any = None
        self._told: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._threads: list[ThreadPoolExecutor] = []
        self._reading = threading.Lock()
        # A GPU that is named twice does its shares in turn: two captures at once would record each other's work.
        self._turn = {d: threading.Lock() for d in self.devices if d.type == "cuda"}

    @classmethod
    def on(cls, devices: Sequence[str | torch.device], local: EngineFactory | None = None) -> Any:
        """A factory of engines on these devices."""
        return partial(cls, devices=devices, local=local)

    @property
    def notes(self) -> list[str]:
        """What the record should say."""
        each = [(twin.device, getattr(twin.engine, "notes", [])) for twin in self.twins]
        kinds = {torch.cuda.get_device_name(d) for d in self.devices if d.type == "cuda"}
        unlike = [f"the devices are of different kinds: {', '.join(sorted(kinds))}"] if len(kinds) > 1 else []
        return unlike + list(dict.fromkeys([*getattr(self.here, "notes", []), *(f"{d}: {note}" for d, notes in each for note in notes)]))

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        self.twins, self._made_of, self._told, self._threads = [], None, {}, []

    def lacks_memory(self, error: RuntimeError) -> bool:
        return any(engine.lacks_memory(error) for engine in self._first())

    def make_room(self, said: str, before: int) -> None:
        """On the first device, where models are put together; it may be named twice, so several engines may hold its memory."""
        engines, refused = self._first(), []
        with _current(self.devices[0]):
            for engine in engines:
                try:
                    engine.make_room(said, before)
                except ConfigError as error:
                    refused.append(error)
        if len(refused) == len(engines):
            raise refused[0]

    def _first(self) -> list[RoomyEngine]:
        """The engines of the first device that can make room."""
        there = [twin.engine for twin, device in zip(self.twins, self.devices) if device == self.devices[0]]
        return [engine for engine in (*there, self.here) if isinstance(engine, RoomyEngine)]

    def run(self, works: Iterable[Work]) -> Iterator[Any]:
        works = list(works)
        if not (ours := for_twins(works)):
            yield from self.here.run(works)
            return
        yield from self._share(ours[0].fed, [w.steps for w in ours], lambda twin, places, stop: twin.engine.run(
            [self._elsewhere(twin, ours[p], stop) for p in places]))

    def map(self, fed: Federation, task: ClientTask, numbers: Sequence[int], common: Any, given: Sequence[Any]) -> Iterator[Any]:
        return self._share(fed, [fed.samples.size_of(i) for i in numbers], lambda twin, places, stop: twin.each(
            task, [numbers[p] for p in places], moved(common, twin.device), [moved(given[p], twin.device) for p in places]))

    @staticmethod
    def _elsewhere(twin: Federation, work: LocalWork, stop: threading.Event) -> LocalWork:
        """The same client's work on a twin."""
        fresh = work.state is work.fed.clients.fresh
        own = _ShardWork(twin, work.number, twin.clients.fresh if fresh else moved(work.state, twin.device), work.cohort,
                         moved(work.download, twin.device))
        own.stop = stop
        return own

    # ---- twins -----------------------------------------------------------------------------------------------------

    def _build(self, fed: Federation) -> None:
        self.close()
        there = {_exact(fed.device): fed}                       # one that holds the samples, for every device
        for device in self.devices:
            engine, store = self.local or local_engine(device), partial(Mirror, device=device, lock=self._reading)
            with _current(device):
                twin = twin_beside(there[device], engine, store) if device in there else build_twin(fed.made_of, engine, device, store)
            there.setdefault(device, twin)
            self.twins.append(twin)
            self._threads.append(ThreadPoolExecutor(1, f"consilience-{device}"))
        self._made_of = fed.made_of

    def _tell(self, fed: Federation) -> None:
        """What the server knows, to every twin. States are replaced, never written to: what is the same object is the same."""
        if self._made_of is not fed.made_of:
            self._build(fed)
        for number, twin in enumerate(self.twins):
            for name in STATE:
                value = getattr(fed, name)
                known = self._told.get((number, name), (None, None))
                if known[0] is not value:
                    same = self.devices[number] == _exact(fed.device)
                    known = self._told[number, name] = value, value if same else moved(value, self.devices[number])
                setattr(twin, name, known[1])
            assert isinstance(twin.clients, Mirror)
            twin.clients.source = fed.clients

    # ---- sharing out -----------------------------------------------------------------------------------------------

    def _share(self, fed: Federation, costs: Sequence[float], begin: Begin) -> Iterator[Any]:
        self._tell(fed)
        inbox: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        stop = threading.Event()
        mode = torch.is_grad_enabled(), torch.get_num_threads()             # both belong to a thread
        home = _exact(fed.device)

        def work(device: torch.device, twin: Federation, places: list[int]) -> None:
            try:
                if torch.get_num_threads() != mode[1]:
                    torch.set_num_threads(mode[1])
                with self._turn.get(device, contextlib.nullcontext()), _current(device), torch.set_grad_enabled(mode[0]):
                    for place, result in zip(places, begin(twin, places, stop)):
                        inbox.put((place, moved(result, home), None))
                        if stop.is_set():
                            return
            except _Stopped:
                return
            except BaseException as error:
                inbox.put((-1, None, error))

        shares = share_out(costs, len(self.twins))
        running = [thread.submit(work, device, twin, places)
                   for thread, device, twin, places in zip(self._threads, self.devices, self.twins, shares) if places]
        try:
            yield from _in_order(inbox, len(costs))
        finally:
            stop.set()                                                      # after an error, Ctrl-C, or when the caller left
            wait(running)


def _in_order(inbox: queue.SimpleQueue[tuple[int, Any, BaseException | None]], count: int) -> Iterator[Any]:
    results: dict[int, Any] = {}
    for given in itertools.count():
        if given == count:
            return
        while given not in results:
            try:
                place, value, error = inbox.get(timeout=1.0)                # so that Ctrl-C is heard on every system
            except queue.Empty:
                continue
            if error is not None:
                raise error
            results[place] = value
        yield results.pop(given)


def _exact(device: str | torch.device) -> torch.device:
    """With its number, which `cuda` leaves open."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
