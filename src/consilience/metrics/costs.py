"""What a method costs: parameters, bytes, memory of a client, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from .. import tree
from ..core.federation import Federation


def model_size(fed: Federation) -> dict[str, int]:
    """Numbers the model holds, and how many of them are trained and travel."""
    every = {**fed.model["params"], **fed.model["buffers"]}
    return {"parameters": sum(t.numel() for t in fed.model["params"].values()),
            "buffers": sum(t.numel() for t in fed.model["buffers"].values()),
            "travelling": sum(every[k].numel() for k in fed.moving),
            "model_bytes": tree.count_bytes(fed.model)}


def traffic(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bytes of all clients together and of one client in one round, up and down. Round 0 is preparation, in the totals only."""
    out: dict[str, Any] = {"rounds": sum(1 for r in records if r["round"] > 0)}
    for way in ("up", "down"):
        spent = [r[f"bytes_{way}"] for r in records if r["round"] > 0]
        sent = sum(max(len(r["cohort"]) - len(r["idle"]) - (len(r["lost"]) if way == "up" else 0), 0) for r in records if r["round"] > 0)
        out[way] = {"total_bytes": sum(r[f"bytes_{way}"] for r in records), "bytes_per_round": sum(spent) / len(spent) if spent else None,
                    "last_round_bytes": spent[-1] if spent else None, "bytes_per_client_and_round": sum(spent) / sent if sent else None}
    return out


def client_memory(fed: Federation) -> dict[str, Any]:
    """Bytes a client holds: between rounds by home, and in a round with the model in training, the one received and shared state."""
    fresh = fed.clients.fresh.tensors
    between = {home: tree.count_bytes(held) for home, held in fresh.items()}
    optimiser = 0 if between["optimiser"] else tree.count_bytes(fed.still)
    model, shared = tree.count_bytes(fed.model), tree.count_bytes(fed.shared)
    total = sum(between.values())
    whole = 2 * model + total + optimiser + shared
    return {"between_rounds_bytes": total, "by_home": between, "model_bytes": model, "shared_bytes": shared,
            "in_a_round_bytes": whole, "between_rounds_in_models": total / model, "in_a_round_in_models": whole / model}


def seconds(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Wall-clock time of the rounds, scoring included, as the run's machine recorded it."""
    spent = [r["measured"]["seconds"] for r in records if r["round"] > 0 and "seconds" in r.get("measured", {})]
    every = [r["measured"]["seconds"] for r in records if "seconds" in r.get("measured", {})]
    return {"total": sum(every), "rounds": len(spent), "mean_per_round": sum(spent) / len(spent) if spent else None,
            "median_per_round": median(spent) if spent else None, "slowest_round": max(spent, default=None)}
