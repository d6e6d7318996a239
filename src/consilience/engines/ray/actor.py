"""A worker on a cluster: builds the federation it is told, then does what it is given with the fast engine of its device."""

from __future__ import annotations

import platform
import socket
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import ray
import torch

from ...core.client import LocalWork, train_client
from ...core.federation import Federation
from .._plain import describe_error
from .._twin import Guests, build_twin, moved
from ..devices import local_engine
from .packing import Packed, pack, unpack


def versions() -> dict[str, str]:
    """What must be the same on both sides for the numbers, and the pickles, to be."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "consilience": version("consilience"),
            "torch": torch.__version__.partition("+")[0]}


class Worker:
    """What a worker remembers between calls. Ray makes an actor of it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if device == "cpu":
            torch.set_num_threads(1)
        self.fed: Federation | None = None
        self.task: Any = None
        self.common: Any = None
        self._trouble: Exception | None = None            # what went wrong before the work; told when it is asked for

    def hello(self) -> tuple[dict[str, str], str, str]:
        """Versions, the machine's name, and what Ray calls it."""
        return versions(), socket.gethostname(), ray.get_runtime_context().get_node_id()

    def build(self, plan: Packed) -> None:
        self.fed, self._trouble = None, None
        try:
            self.fed = build_twin(unpack(plan, copy=False), local_engine(self.device), self.device)
        except Exception as error:
            self._trouble = error

    def set_up(self, setting: Packed) -> None:
        """What all work of one call shares: the server's state, the task and what it is told in common."""
        if self.fed is None:
            return
        try:
            state, self.task, common = unpack(setting, copy=False)
            self.common = moved(common, self.device, whole=True)
            for name, value in state.items():
                setattr(self.fed, name, moved(value, self.device, whole=True))
        except Exception as error:
            self._trouble = error

    def work(self, parcel: Packed) -> tuple[Any, ...]:
        """("done", results, the engine's notes), or ("failed", the error as it travels, its traceback)."""
        try:
            if self._trouble is not None:
                raise self._trouble
            chunk = moved(unpack(parcel, copy=False), self.device, whole=True)
            with torch.no_grad():
                results = list(self._results(chunk))
            return "done", pack(results), list(getattr(self.fed.engine, "notes", []))      # type: ignore[union-attr]
        except Exception as error:
            return "failed", describe_error(error), traceback.format_exc()

    def _results(self, chunk: list[tuple[int, Any, Any]]) -> Iterator[Any]:
        fed = self.fed
        assert fed is not None
        assert isinstance(fed.clients, Guests)
        fed.clients.host({number: state or fed.clients.fresh for number, state, _ in chunk})
        if self.task is train_client:                           # all at once, so that slots can hold many
            with torch.enable_grad():
                yield from fed.engine.run([LocalWork(fed, number, fed.client(number), self.common, given) for number, _, given in chunk])
        else:
            yield from fed.each(self.task, [number for number, _, _ in chunk], self.common, [given for _, _, given in chunk])
