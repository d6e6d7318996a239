"""Accuracy of every client at the end of a run: who gains by federation, and who is harmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics.clients import bottom_decile, client_mean, harmed, worst
from .gather import Group, StoredRun


def client_scores(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For every run the clients' last accuracies from worst to best, beside those of clients training alone.

    A local run is comparable when its seed and its split are the same: with another split the names mean other clients.
    """
    alone = {(r.seed, r.about.get("hash")): _last(r) for g in groups if g.is_local for r in g.runs}
    out = []
    for number, group in enumerate(groups):
        for run in group.runs:
            own = _last(run)
            if not own:
                continue
            local = None if group.is_local else alone.get((run.seed, run.about.get("hash")))
            names = sorted(own, key=lambda name: (own[name], name))
            out.append({"group": number, "seed": run.seed, "round": run.scored[-1]["round"], "names": names,
                        "accuracy": [round(own[n], 5) for n in names],
                        "local": [round(local[n], 5) if n in local else None for n in names] if local else None,
                        **summary_of(own, local)})
    return out


def _last(run: StoredRun) -> dict[str, float]:
    return run.scored[-1]["personalised"].get("per_client") or {}


def summary_of(own: Mapping[str, float], local: Mapping[str, float] | None) -> dict[str, Any]:
    """The worst client, the mean of the worst tenth, the spread, and how many do worse than alone."""
    lowest, against = worst(own), harmed(own, local or {})
    return {"worst": lowest[1] if lowest else None, "bottom_decile": bottom_decile(own), "mean": client_mean(own),
            "std": float(np.std(list(own.values()))), "compared": against["clients"] or None,
            "harmed": against["harmed"] if against["clients"] else None, "gain": against["mean_gain"]}
