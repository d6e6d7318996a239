"""Read one number from a run's records exactly as a protocol says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..metrics.curves import ROUNDING
from ..runs.result import served_accuracies
from .format import Score

Record = dict[str, Any]
_AVERAGES = {"pooled": "accuracy", "clients": "mean", "worst": "worst"}


def value_of(score: Score, records: Sequence[Record]) -> float | None:
    """The number a protocol takes from records, in the record's own units (fractions, rounds, seconds, bytes). None where there is none."""
    known = [(v, r) for r in records if (v := _read(score, r)) is not None]
    if score.reach is not None:                                 # equal counts as reached in spite of binary fractions
        return next((float(r["round"]) for v, r in known if v >= score.reach - ROUNDING), None)
    chosen = choose(score, known)
    if not chosen:
        return None
    if score.report == "value":
        return score.factor * sum(v for v, _ in chosen) / len(chosen)
    last = max(r["round"] for _, r in chosen)
    if score.report == "round":
        return score.factor * last
    if score.report == "bytes_up":
        return score.factor * sum(r["bytes_up"] for r in records if r["round"] <= last)
    spent = [r["measured"]["seconds"] for r in records if r["round"] <= last and "seconds" in r.get("measured", {})]
    if score.report == "seconds":
        return score.factor * sum(spent) if spent else None
    spent = [r["measured"]["seconds"] for r in records if r["round"] > 0 and "seconds" in r.get("measured", {})]
    return score.factor * sum(spent) / len(spent) if spent else None


def choose(score: Score, known: Sequence[tuple[float, Record]]) -> list[tuple[float, Record]]:
    """The rounds a value is taken from. Among equals the earliest."""
    if score.select == "last":
        return list(known[-1:])
    if isinstance(score.select, int):
        return [pair for pair in known if pair[1]["round"] == score.select]
    best = -1.0 if score.what == "loss" else 1.0                # a loss is best where it is lowest
    if score.select == "validation":
        judge = {"clients": "mean", "pooled": "accuracy"}[score.judge]
        judged = [(j, pair) for pair in known if (j := (pair[1].get("validation") or {}).get(judge)) is not None]
        return [max(judged, key=lambda entry: (entry[0], -entry[1][1]["round"]))[1]] if judged else []
    ranked = sorted(known, key=lambda pair: (-best * pair[0], pair[1]["round"]))
    return ranked[: 5 if score.select == "best5" else 1]


def _read(score: Score, record: Record) -> float | None:
    if score.taken is not None:
        name, _, place = score.taken.partition(".")
        result = (record.get("measures") or {}).get(name)
        return value_in(result, place, name) if result is not None and "left_out" not in result else None
    if score.samples in ("validation", "held_out"):
        part = record.get(score.samples) or {}
    elif score.model == "own":
        part = served_accuracies(record) if record.get("personalised") or record.get("global") else {}
    else:
        part = record.get(score.model) or {}
    if score.samples == "test":
        # the global test set is scored by the global model alone, and by accuracy alone
        return (record.get("global") or {}).get("test") if score.model != "personalised" and score.what == "accuracy" else None
    if score.client is not None:
        return _each(score, part).get(score.client)
    if score.what == "accuracy":
        return part.get(_AVERAGES[score.average])
    if score.average == "pooled":
        return part.get(score.what)
    each = _each(score, part).values()
    return None if not each else min(each) if score.average == "worst" else sum(each) / len(each)


def _each(score: Score, part: Record) -> dict[str, float]:
    """What is scored, client by client."""
    return (part.get("per_client") if score.what == "accuracy" else (part.get("by_client") or {}).get(score.what)) or {}


def value_in(result: Mapping[str, Any], path: str, measure: str) -> float | None:
    """A number inside a measure's result, by its dotted place."""
    found: Any = result
    for word in path.split("."):
        if not isinstance(found, Mapping) or word not in found:
            raise ConfigError(f"The measure {measure} has no value {path!r}: {word!r} is not in its result.")
        found = found[word]
    if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float))):
        raise ConfigError(f"The value {path!r} of the measure {measure} is not a number: {found!r}.")
    return found
