"""What one score per client says together: mean, the worst, who is harmed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .curves import ROUNDING


def client_mean(scores: Mapping[str, float]) -> float | None:
    """Every client counts the same."""
    return sum(scores.values()) / len(scores) if scores else None


def worst(scores: Mapping[str, float]) -> tuple[str, float] | None:
    """The client with the lowest score; the first by name among equals."""
    if not scores:
        return None
    name = min(scores, key=lambda n: (scores[n], n))
    return name, scores[name]


def bottom_decile(scores: Mapping[str, float]) -> float | None:
    """Mean over the tenth of the clients that score lowest: ⌈K/10⌉ of them."""
    lowest = sorted(scores.values())[: math.ceil(len(scores) / 10)]
    return sum(lowest) / len(lowest) if lowest else None


def harmed(scores: Mapping[str, float], alone: Mapping[str, float], margin: float = 0.0) -> dict[str, Any]:
    """Clients that score more than `margin` below what they reach by training alone. Clients missing on a side are left out."""
    gains = {name: scores[name] - alone[name] for name in scores if name in alone}
    losing = {name: -g for name, g in gains.items() if g < -margin - ROUNDING}
    return {"clients": len(gains), "harmed": len(losing), "share": len(losing) / len(gains) if gains else None,
            "mean_gain": client_mean(gains), "mean_loss_of_harmed": client_mean(losing),
            "worst_hit": max(losing, key=lambda n: (losing[n], n)) if losing else None, "gain_per_client": gains}
