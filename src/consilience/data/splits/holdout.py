"""Whole clients that are not trained on: leave-one-client-out, and participants that join after training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import Tensor

from ... import rng
from ...errors import ConfigError, unknown
from ..federated import FederatedData


def hold_out(data: FederatedData, clients: Sequence[int | str]) -> tuple[FederatedData, FederatedData]:
    """(the clients to train on, the clients held out), with the same samples. Clients are given by number or name.

    Clients are numbered anew in both; their names stay. The test set that belongs to no client goes with both.
    """
    names = data.table.names
    held = set()
    for client in clients:
        if isinstance(client, str) and client not in names:
            raise unknown(f"client of {data.name!r}", client, names)
        if not isinstance(client, str) and not 0 <= client < data.population:
            raise ConfigError(f"{data.name!r} has clients 0 to {data.population - 1}. Cannot hold out client {client}.")
        held.add(names.index(client) if isinstance(client, str) else client)
    if not held:
        raise ConfigError("No client was named to be held out.")
    if len(held) == data.population:
        raise ConfigError(f"All {data.population} clients of {data.name!r} would be held out: none is left to train on.")
    told = {"held_out": [names[i] for i in sorted(held)]}
    apart = tuple(c for i, c in enumerate(data.clients) if i in held)

    def part(wanted: bool, role: str) -> FederatedData:
        return dataclasses.replace(data, clients=tuple(c for i, c in enumerate(data.clients) if (i in held) == wanted),
                                   held_out=() if wanted else apart, description={**data.description, **told, "clients": role})

    return part(False, "trained on"), part(True, "held out")


def leave_one_out(data: FederatedData) -> Iterator[tuple[str, FederatedData, FederatedData]]:
    """For each client: its name, the data of the others, its own data."""
    for i, client in enumerate(data.clients):
        yield client.name, *hold_out(data, [i])


def draw_clients(data: FederatedData, number: int, key: Tensor) -> list[int]:
    """`number` clients drawn without replacement, sorted: new participants for `hold_out`."""
    if not 0 < number < data.population:
        raise ConfigError(f"The number of clients to draw must be 1 to {data.population - 1}. Got {number} instead.")
    return sorted(rng.permutation(rng.key(key, "holdout"), data.population)[:number].tolist())
