"""Curves over rounds, bytes and seconds: one for every run, and the mean with a band for every group of seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..metrics.criterion import model_score, pooled_measure
from .gather import Group, StoredRun

MOST_POINTS = 400            # more points than a screen has room for are thinned out

# name, what is drawn, how it is read from a record
Score = tuple[str, str, Callable[[dict[str, Any]], Any]]
_SCORES: tuple[Score, ...] = (
    ("personalised", "accuracy of the clients' models", lambda r: _score(r, "personalised", "accuracy")),
    ("global", "accuracy of the global model", lambda r: _score(r, "global", "accuracy")),
    ("mean", "accuracy, mean over clients", lambda r: _score(r, "personalised", "mean")),
    ("worst", "accuracy of the worst client", lambda r: _score(r, "personalised", "worst")),
    ("test", "accuracy on the global test set", lambda r: _score(r, "global", "test")),
    ("validation", "accuracy on validation samples", lambda r: _score(r, "validation", "accuracy")),
    ("dice", "Dice of the clients' models", lambda r: _score(r, "personalised", "dice")),
    ("test_loss", "loss on test samples", lambda r: _score(r, "personalised", "loss")),
    ("loss", "training loss", lambda r: r.get("loss")),
)

SCORE_NAMES = ("criterion", *(name for name, _, _ in _SCORES))


def _score(record: dict[str, Any], model: str, measure: str) -> Any:
    return (record.get(model) or {}).get(measure)


def _scores_of(groups: Sequence[Group]) -> list[Score]:
    """What every run has, and what these runs were told to measure: numbers over all samples of the models that clients are served by."""
    records = [r for group in groups for run in group.runs for r in run.scored]
    judged = {r["criterion"]["measure"]: None for r in records if r.get("criterion")}
    measured = {name: None for r in records for name in r.get("measures") or ()}
    found: list[Score] = [("criterion", f"{', '.join(judged)} of the clients' models, the criterion",
                           lambda r: model_score(r, "personalised").get("value") if r.get("criterion") else None)] if judged else []
    found += [(f"measure:{name}", f"{name} of the clients' models", lambda r, name=name: pooled_measure(r, name))  # type: ignore[misc]
              for name in measured if name not in judged]
    return [*found, *_SCORES]


def draw_curves(groups: Sequence[Group]) -> dict[str, Any]:
    """What the page needs to draw: measures that some run has, and the curves of every group."""
    scores = _scores_of(groups)
    drawn = [(_curves_of(group, scores), group) for group in groups]
    has = [name for name, _, _ in scores if any(name in run["y"] for c, _ in drawn for run in c["runs"])]
    return {"measures": [{"name": n, "label": label} for n, label, _ in scores if n in has],
            "groups": [c for c, _ in drawn]}


def _curves_of(group: Group, scores: Sequence[Score]) -> dict[str, Any]:
    rounds = _rounds_shown(group.runs)
    runs = [_curve(run, rounds, scores) for run in group.runs]
    common = sorted(set.intersection(*(set(r["round"]) for r in runs)))
    return {"label": group.label, "runs": runs, "mean": _mean_curve(runs, common) if len(runs) > 1 and common else None,
            "thinned": len(rounds) < len({r["round"] for run in group.runs for r in run.scored})}


def _rounds_shown(runs: Sequence[StoredRun]) -> set[int]:
    """Evenly spaced scored rounds, the same for all seeds; the last and every run's best and worst are always among them."""
    scored = sorted({r["round"] for run in runs for r in run.scored})
    if len(scored) <= MOST_POINTS:
        return set(scored)
    picked = {scored[i] for i in np.linspace(0, len(scored) - 1, MOST_POINTS).round().astype(int)}
    for run in runs:
        known = [(v, r["round"]) for r in run.scored if (v := _score(r, "personalised", "accuracy")) is not None]
        picked |= {run.scored[-1]["round"], *(n for _, n in (min(known), max(known)) if known)} if known else set()
    return picked


def _curve(run: StoredRun, rounds: set[int], scores: Sequence[Score]) -> dict[str, Any]:
    """One run. Bytes and seconds are sums up to the round, rounds without scores included."""
    sent = list(accumulate(r["bytes_up"] + r["bytes_down"] for r in run.records))
    took = list(accumulate((r.get("measured") or {}).get("seconds", 0.0) for r in run.records))
    shown = [(i, r) for i, r in enumerate(run.records) if r.get("personalised") and r["round"] in rounds]
    values = {name: [_short(read(r)) for _, r in shown] for name, _, read in scores}
    return {"seed": run.seed, "round": [r["round"] for _, r in shown], "bytes": [sent[i] for i, _ in shown],
            "seconds": [_short(took[i]) for i, _ in shown], "y": {k: v for k, v in values.items() if any(x is not None for x in v)}}


def _mean_curve(runs: Sequence[dict[str, Any]], rounds: Sequence[int]) -> dict[str, Any]:
    """Mean and standard deviation (n − 1) over the rounds that every seed has. Bytes and seconds are means too."""
    at = [[run["round"].index(n) for n in rounds] if len(run["round"]) != len(rounds) else list(range(len(rounds))) for run in runs]
    pick = lambda values, where: [values[i] for i in where]
    out: dict[str, Any] = {"round": list(rounds), "y": {}}
    for axis in ("bytes", "seconds"):
        out[axis] = [_short(v) for v in np.mean([pick(run[axis], where) for run, where in zip(runs, at)], axis=0)]
    for name in runs[0]["y"]:
        if all(name in run["y"] for run in runs):
            table = np.array([pick(run["y"][name], where) for run, where in zip(runs, at)], dtype=float)
            out["y"][name] = {"mean": [_short(v) for v in table.mean(0)], "std": [_short(v) for v in table.std(0, ddof=1)]}
    return out


def _short(value: Any) -> float | None:
    """Five digits are more than a screen shows. What is not a number leaves a gap."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{float(value):.5g}")
