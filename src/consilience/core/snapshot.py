"""All that a federation must remember, as flat tensors and plain numbers; enough to go on bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import DataError
from .client import ClientState
from .federation import Federation

_NUMBERS = ("round_number", "last_exchange", "clock", "prepared", "versions", "took_part")


def snapshot(fed: Federation, clients: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by path, and a JSON-able description of the rest. A store that keeps itself need not be in it: clients=False."""
    states = dict(fed.clients.visited()) if clients else {}
    everything = {"model": fed.model, "shared": fed.shared, "server": fed.server,
                  "clients": {str(i): s.tensors for i, s in states.items()}}
    tensors = {path: leaf.detach().cpu().contiguous() for path, leaf in tree.paths(everything)}
    meta = {name: copy.copy(getattr(fed, name)) for name in _NUMBERS}
    meta["clients"] = {str(i): {"first": s.first, "seen": s.seen, "own_round": s.own_round} for i, s in states.items()}
    return tensors, meta


def restore(fed: Federation, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Put a snapshot into a federation built from the same configuration; names, shapes and dtypes must agree."""
    expected: dict[str, Tensor] = dict(tree.paths({"model": fed.model, "shared": fed.shared, "server": fed.server}))
    fresh = dict(tree.paths(fed.clients.fresh.tensors))
    for number in meta["clients"]:
        expected.update({f"clients/{number}/{path}": leaf for path, leaf in fresh.items()})
    for path in sorted(expected.keys() | tensors.keys()):
        if path not in tensors or path not in expected:
            how = "missing" if path not in tensors else "not expected"
            raise DataError(f"The snapshot does not fit this run: {path!r} is {how}.")
        if tensors[path].shape != expected[path].shape or tensors[path].dtype != expected[path].dtype:
            raise DataError(f"The snapshot does not fit this run: {path!r} is {tuple(tensors[path].shape)} {tensors[path].dtype}, "
                            f"expected {tuple(expected[path].shape)} {expected[path].dtype}.")
    # with the device and memory layout of what it replaces
    placed = {path: torch.empty_like(expected[path]).copy_(tensor) for path, tensor in tensors.items()}
    fed.model, fed.shared, fed.server = (tree.like(getattr(fed, home), placed, home) for home in ("model", "shared", "server"))
    fed.clients.clear()                  # a store that keeps itself is told to go back by whoever has its checkpoint
    for number, numbers in meta["clients"].items():
        fed.clients.put(int(number), ClientState(tree.like(fed.clients.fresh.tensors, placed, f"clients/{number}"), **numbers))
    fed.clients.commit()
    for name in _NUMBERS:
        if name in meta:                 # `took_part` is not in snapshots of before it was kept
            setattr(fed, name, copy.copy(meta[name]))
