"""Numbers that say how a split is skewed: labels per client, sizes, and distances from the pooled labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.population import RowTable
from ..errors import ConfigError
from .federated import FederatedData

PARTS = ("all", "train", "val", "test")


def rows_of(data: FederatedData, part: str = "all") -> RowTable:
    """The rows of each client: all it owns, or one part."""
    if part not in PARTS:
        raise ConfigError(f"The part of a client's rows must be one of {', '.join(PARTS)}. Got {part!r} instead.")
    table: RowTable = data.table.everything() if part == "all" else getattr(data.table, part)
    return table


def count_labels(y: Tensor, rows: Sequence[Tensor], classes: int) -> Tensor:
    """Clients × classes. Masks have no label per sample: all samples count as one class."""
    table = RowTable.of(rows)
    if y.dim() != 1:
        return table.sizes[:, None]
    return torch.bincount(table.owner * classes + y[table.rows], minlength=len(table) * classes).view(len(table), classes)


def effective_classes(counts: Tensor) -> Tensor:
    """exp of the entropy of each client's labels: k for k equal classes, 1 for one class, 0 for a client without samples."""
    p = _shares(counts)
    return torch.where(counts.sum(1) > 0, torch.special.entr(p).sum(1).exp(), 0)


def total_variation(counts: Tensor) -> Tensor:
    """Half the sum of |client's share − pooled share| over the classes, per client: 0 alike, 1 nothing in common."""
    return (_shares(counts) - _shares(counts.sum(0, keepdim=True))).abs().sum(1) / 2


def jensen_shannon(counts: Tensor) -> Tensor:
    """Jensen–Shannon divergence of each client's labels from the pooled labels, in bits: 0 alike, 1 nothing in common."""
    p, q = _shares(counts), _shares(counts.sum(0, keepdim=True))
    entropy = lambda share: torch.special.entr(share).sum(1)
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0) / torch.log(torch.tensor(2.0))


def describe_counts(counts: Tensor) -> dict[str, Any]:
    """All numbers of one table of clients × classes, ready for JSON. Means are over clients with samples, each counting once."""
    sizes = counts.sum(1).double()
    filled = counts[sizes > 0]
    spread = float(sizes.std(correction=0) / sizes.mean()) if float(sizes.sum()) else 0.0
    return {
        "clients": len(counts),
        "classes": counts.shape[1],
        "samples": int(sizes.sum()),
        "counts": counts.tolist(),
        "effective_classes": _summary(effective_classes(filled)),
        "classes_held": _summary((filled > 0).sum(1)),
        "size": {**_summary(sizes), "coefficient_of_variation": spread},
        "label_skew": {"total_variation": _mean(total_variation(filled)), "jensen_shannon": _mean(jensen_shannon(filled))},
    }


def describe(data: FederatedData, part: str = "all") -> dict[str, Any]:
    """The numbers of a federated data set; `counts` has a row per client, in the order of `names`."""
    counts = count_labels(data.y, rows_of(data, part), data.classes)
    return {"name": data.name, "part": part, "hash": data.split_hash(), "names": list(data.table.names),
            **describe_counts(counts)}


def _shares(counts: Tensor) -> Tensor:
    return counts.double() / counts.sum(1, keepdim=True).clamp(min=1)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _summary(values: Tensor) -> dict[str, float]:
    if not len(values):
        return {"min": 0.0, "median": 0.0, "mean": 0.0, "max": 0.0}
    values = values.double()
    return {"min": float(values.min()), "median": float(values.quantile(0.5)), "mean": float(values.mean()),
            "max": float(values.max())}
