"""The score of every client at the end of a run: who gains by federation, and who is harmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics.clients import bottom_decile, client_mean, harmed, worst
from ..metrics.criterion import measure_of, model_score
from .gather import Group, StoredRun


def client_scores(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For every run the clients' last scores, by what the run is judged by, from worst to best, beside those of clients training alone.

    A local run is comparable when its seed, its split and its criterion are the same: with another split the names mean other clients.
    """
    alone = {_alike(r): _last(r) for g in groups if g.is_local for r in g.runs}
    out = []
    for number, group in enumerate(groups):
        for run in group.runs:
            own = _last(run)
            if not own:
                continue
            local = None if group.is_local else alone.get(_alike(run))
            names = sorted(own, key=lambda name: (own[name], name))
            out.append({"group": number, "seed": run.seed, "round": run.scored[-1]["round"], "names": names,
                        "measure": measure_of(run.scored[-1]),
                        "accuracy": [round(own[n], 5) for n in names],
                        "local": [round(local[n], 5) if n in local else None for n in names] if local else None,
                        **summary_of(own, local)})
    return out


def _alike(run: StoredRun) -> tuple[Any, ...]:
    return run.seed, run.about.get("hash"), measure_of(run.scored[-1]) if run.scored else None


def _last(run: StoredRun) -> dict[str, float]:
    return model_score(run.scored[-1], "personalised").get("per_client") or {}


def summary_of(own: Mapping[str, float], local: Mapping[str, float] | None) -> dict[str, Any]:
    """The worst client, the mean of the worst tenth, the spread, and how many do worse than alone."""
    lowest, against = worst(own), harmed(own, local or {})
    return {"worst": lowest[1] if lowest else None, "bottom_decile": bottom_decile(own), "mean": client_mean(own),
            "std": float(np.std(list(own.values()))), "compared": against["clients"] or None,
            "harmed": against["harmed"] if against["clients"] else None, "gain": against["mean_gain"]}
