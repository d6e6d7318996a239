"""How a cell is scored, put together from what its paper, table, column, row and the cell itself say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from ..metrics.registry import make_measures
from ..options import build
from .format import Score


def score_of(levels: Sequence[Mapping[str, Any]]) -> Score:
    """The nearer level has the last word, also on whether a measure is taken of the trained run or on its way."""
    merged: dict[str, Any] = {}
    for level in levels:
        dropped = ("taken",) if "measure" in level else ("measure", "value") if "taken" in level else ()
        merged = {**{k: v for k, v in merged.items() if k not in dropped}, **level}
    return _checked_score(json.dumps(merged, sort_keys=True))


@lru_cache(maxsize=1024)
def _checked_score(values: str) -> Score:
    score = build(Score, json.loads(values), "the score")
    if score.measure:
        make_measures([score.measure])
    return score


def stands_beside(score: Score, other: Mapping[str, Any]) -> bool:
    """Whether a second score can stand beside the first. A measure of the trained run has no second choice of rounds, nor have the bytes
    of a whole run, and a measure that the run takes on its way is of no other model or samples."""
    if score.measure:
        return "measure" in other
    if score.report == "bytes_up":
        return "report" in other
    return score.taken is None or "taken" in other or not {"model", "samples", "client", "average", "what"} & other.keys()


def check_taken(score: Score, values: Mapping[str, Any] | None) -> None:
    """A number that the run is to take on its way belongs to one of the run's measures."""
    if score.taken is not None and values is not None:
        taken = [m.name for m in make_measures(values.get("measure", ()))]
        if (name := score.taken.partition(".")[0]) not in taken:
            raise ConfigError(f"it is scored by the measure {name!r}, which its run does not take: add measure = [\"{name}\"] to run.")
