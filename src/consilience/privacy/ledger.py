"""What all releases so far may have told about each client, as tensors that a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .accountant import ORDERS, epsilon_of, rdp_of, sampled_epsilon_of

PREPARE = "prepare"            # releases whose name begins so are made once, by all clients
_REPLACE = 4.0                 # another client's data in place of one's own move a sum by 2C where leaving moves it by C


def fresh(population: int) -> dict[str, Tensor]:
    """Per client Σ 1/z² of its releases as the published sums show them (spent) and as single uploads do (seen), and their number;
    and Rényi divergences of rounds whose clients were drawn.
    """
    each = torch.zeros(population, dtype=torch.float64)
    return {"spent": each, "seen": each.clone(), "releases": each.clone(), "rdp": torch.zeros(ORDERS, dtype=torch.float64)}


def record(state: Mapping[str, Tensor], releases: Mapping[str, list[int]], asked: Mapping[str, list[int]], *, noise: float, place: str,
           cohort: int, population: int) -> dict[str, Tensor]:
    """The ledger after the releases of one round: name -> the clients whose uploads were put together, and who was asked for them.

    Who was asked may have sent its upload, though it came too late or was refused: nobody published it, but the server saw it.
    Each client's share of the noise is made for the expected number of clients, m. Where only m′ of them arrive, the sum has
    m′/m of the variance, and the release costs m/m′ times as much.
    """
    new = {k: t.clone() for k, t in state.items()}
    joint, drawn = 0.0, cohort
    for name, ids in releases.items():
        if not ids:
            continue
        expected = population if name.startswith(PREPARE) else cohort
        whole = 1 / noise**2 if noise else math.inf
        spent = whole * expected / len(ids) if place == "client" else whole
        seen = {"client": whole * expected, "local": whole, "server": math.inf}[place]
        new["spent"][ids] += spent
        new["seen"][asked[name]] += seen
        new["releases"][ids] += 1
        joint, drawn = joint + spent, max(drawn, expected)
    if joint and math.isfinite(joint) and cohort < population:
        new["rdp"] += torch.tensor(rdp_of(joint * _REPLACE, drawn, population), dtype=torch.float64, device=new["rdp"].device)
    return new


def report(state: Mapping[str, Tensor], *, delta: float, sampled: bool, secret: bool) -> dict[str, Any]:
    """(ε, δ) so far, for the client that released most; None where there is no bound."""
    spent, seen = float(state["spent"].max()), float(state["seen"].max())
    finite = lambda e: e if math.isfinite(e) else None
    return {"delta": delta, "releases": int(state["releases"].max()), "epsilon": finite(epsilon_of(spent, delta)),
            "epsilon_replace": finite(epsilon_of(_REPLACE * spent, delta)),
            "epsilon_sampled": finite(sampled_epsilon_of(state["rdp"].tolist(), delta)) if sampled and math.isfinite(spent) else None,
            "epsilon_server": finite(epsilon_of(seen, delta)), "noise": "secret" if secret else "keyed"}
