"""Samples of every class on every client, counted from the data set a run was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.statistics import describe
from ..errors import ConsilienceError
from ..runs.reload import read_run_config
from ..runs.run import load_data
from .gather import StoredRun

MOST_SPLITS = 5              # different splits pictured; with a seed each, more pictures say nothing new
MOST_CLIENTS = 100           # clients in a picture


def picture_splits(runs: Sequence[StoredRun], data_dir: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Counts for each different split, and notes about those that cannot be had: the data may lie on another machine."""
    first: dict[str, StoredRun] = {}
    for run in sorted(runs, key=lambda r: r.seed):
        first.setdefault(run.about.get("hash", ""), run)
    out: list[dict[str, Any]] = []
    notes: list[str] = []
    if len(first) > MOST_SPLITS:
        notes.append(f"The runs have {len(first)} different splits; the first {MOST_SPLITS} are shown.")
    for code, run in list(first.items())[:MOST_SPLITS]:
        try:
            data = load_data(read_run_config(run.path, data_dir)[0])
        except ConsilienceError as error:
            notes.append(f"No picture of split {code}: {error}")
            continue
        numbers = describe(data)
        if numbers["hash"] != code:
            notes.append(f"No picture of split {code}: the data are divided differently now ({numbers['hash']}).")
            continue
        names = run.about.get("class_names") or []
        out.append({"hash": code, "seed": run.seed, "data": data.name, "split": str(run.about.get("split", "")),
                    "clients": numbers["clients"], "names": numbers["names"][:MOST_CLIENTS], "counts": numbers["counts"][:MOST_CLIENTS],
                    "classes": [str(n) for n in names] if len(names) == numbers["classes"] else
                    [str(c) for c in range(numbers["classes"])],
                    "samples": numbers["samples"], "size": numbers["size"], "effective": numbers["effective_classes"]["mean"],
                    "skew": numbers["label_skew"]["total_variation"]})
    return out, notes
