"""Where a run keeps its clients' states: in memory, or in a file of its folder; and how checkpoints and `best/` hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import tree
from ..core.client import ClientState
from ..core.federation import Federation
from ..core.store import ClientStore
from ..engines.estimate import choose_store
from ..engines.store import INDEX, DiskStore
from ..tree import Tree
from .files import disk, read_tensors, write_tensors

FOLDER = "states"                  # of a run's folder, where the states lie that are not in memory
MOST_FILES = 1000                  # clients whose own tensors are written to a file each
TOGETHER = "clients.safetensors"   # those of more clients, where they are in memory


def settle_store(fed: Federation, asked: str, rounds: int, folder: Path | None) -> None:
    """Give the federation its store, before anything is put into it. A run that goes on stays where it began, unless asked."""
    if asked == "auto" and folder is not None and (kinds := _kinds(folder)):
        asked = kinds[0]
    fed.clients = choose_store(fed, rounds, None if folder is None else folder / FOLDER, asked)(fed.clients.fresh)


def _kinds(folder: Path) -> list[str]:
    """How the checkpoints of a run hold states, newest first."""
    there = sorted((folder / "checkpoints").glob("round-*"), reverse=True)
    return ["disk" if (at / INDEX).is_file() else "memory" for at in there]


def describe_store(fed: Federation) -> dict[str, Any]:
    return {"store": "disk" if isinstance(fed.clients, DiskStore) else "memory"}


# ---- checkpoints ---------------------------------------------------------------------------------------------------

def save_states(fed: Federation, draft: Path, name: str) -> dict[str, Any]:
    """What a checkpoint's description says of states that are not in its tensors."""
    return {"clients": fed.clients.save(draft, name)} if isinstance(fed.clients, DiskStore) else {}


def forget_states(fed: Federation, name: str) -> None:
    """A checkpoint was deleted."""
    if isinstance(fed.clients, DiskStore):
        fed.clients.forget(name)


def checked_store(fed: Federation, run: Path, folder: Path, about: Mapping[str, Any]) -> DiskStore | None:
    """The store that a checkpoint refers to, found sound; None where its states are among its tensors."""
    if "clients" not in about:
        return None
    own = fed.clients if isinstance(fed.clients, DiskStore) and fed.clients.folder == run / FOLDER else \
        DiskStore(fed.clients.fresh, run / FOLDER)
    own.check(folder, about["clients"])
    return own


def load_states(fed: Federation, store: DiskStore, run: Path, folder: Path, about: Mapping[str, Any]) -> None:
    """Bring the federation's clients to a checkpoint that `checked_store` found sound."""
    older = [at for at in (run / "checkpoints").glob("round-*") if at.name < folder.name]
    store.load(folder, about["clients"], folder.name, [(at.name, at) for at in (*older, run / "best") if (at / INDEX).is_file()])
    if store is not fed.clients:                           # it was asked for another store than the run began with
        fed.clients.clear()
        for number, state in store.visited():
            fed.clients.put(number, state)
        fed.clients.commit()
        store.close()


# ---- clients' own tensors beside the global model --------------------------------------------------------------------

def _own_homes(fed: Federation, state: ClientState) -> Tree:
    homes = {home: state.tensors[home] for home in ("personal", "local")}
    served = {p.name: state.tensors["kept"][p.name] for p in fed.method.using("personalise") if state.tensors["kept"].get(p.name)}
    return {**homes, "kept": served} if served else homes


def own_tensors(fed: Federation, state: ClientState) -> dict[str, Tensor]:
    """What a client keeps of its model: personal tensors, the part that never travels, and, once it took part, what the model that
    serves it is made of, as APFL's mixture.
    """
    homes = _own_homes(fed, state)
    return dict(tree.paths({k: v for k, v in homes.items() if k != "kept" or not state.first}))


def save_best(fed: Federation, folder: Path) -> None:
    """States of many clients beside the best global model: no state is written twice."""
    if isinstance(fed.clients, DiskStore):
        with disk("write", folder):
            fed.clients.save(folder, folder.name)
    else:
        write_tensors(folder / TOGETHER, {f"{i}/{path}": t for i, s in fed.clients.visited()
                                          for path, t in own_tensors(fed, s).items()})


def return_to_best(fed: Federation, run: Path) -> None:
    """Clients' own tensors as `save_best` kept them; all else stays."""
    folder = run / "best"
    if (folder / INDEX).is_file():
        best = DiskStore(fed.clients.fresh, run / FOLDER)
        best.load(folder, None, folder.name)
        fed.clients = _Best(fed, best)
        return
    each: dict[int, dict[str, Tensor]] = {}
    for path, tensor in read_tensors(folder / TOGETHER).items():
        owner, _, rest = path.partition("/")
        each.setdefault(int(owner), {})[rest] = tensor
    fresh = own_tensors(fed, fed.clients.fresh)
    for number, state in list(fed.clients.visited()):
        fed.clients.put(number, with_own(fed, state, each.get(number, fresh)))


def with_own(fed: Federation, state: ClientState, own: Mapping[str, Tensor]) -> ClientState:
    """A client's state with other tensors of its own, served by the global model rather than one it trained alone."""
    homes, fresh = _own_homes(fed, state), fed.clients.fresh.tensors["kept"]
    newcomer = "kept" in homes and not any(path.startswith("kept/") for path in own)          # it had not taken part then
    kept = {**state.tensors["kept"], **({name: fresh[name] for name in homes["kept"]} if newcomer else {})}
    taken = filled({k: v for k, v in homes.items() if k != "kept" or not newcomer}, own)
    return replace(state, tensors={**state.tensors, **taken, "kept": {**kept, **taken.get("kept", {})}}, own_round=0,
                   first=state.first or newcomer)


def filled(template: Any, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    """A tree like `template` with tensors that a file gives by path. Homes without tensors, which it cannot show, stay."""
    if isinstance(template, dict):
        return {k: filled(v, tensors, f"{path}/{k}" if path else k) for k, v in template.items()}
    return tensors[path].to(template.device)


class _Best(ClientStore):
    """The last round's states with the own tensors of the best one, put together when asked for."""

    def __init__(self, fed: Federation, best: ClientStore) -> None:
        super().__init__(fed.clients.fresh)
        self._fed, self._last, self._best = fed, fed.clients, best

    def _read(self, number: int) -> ClientState:
        return with_own(self._fed, self._last.get(number), own_tensors(self._fed, self._best.get(number)))

    def _numbers(self) -> Iterator[int]:
        return self._last.numbers()

    def _write(self, states: Mapping[int, ClientState]) -> None:
        if states:
            raise NotImplementedError("the best round's states are only looked at")

    def _forget(self) -> None:
        raise NotImplementedError("the best round's states are only looked at")


def opened_store(fed: Federation, run: Path) -> None:
    """For a run that is only looked at: states stay where they lie."""
    if "disk" in _kinds(run):
        fed.clients = DiskStore(fed.clients.fresh, run / FOLDER)
