"""How far a client's parameters went from where it started."""

from __future__ import annotations

import math

from ..core.layout import Layout
from ..tree import Flat

REGIONS = ("extractor", "header", "head")


def drift(local: Flat, start: Flat, layout: Layout) -> dict[str, dict[str, float | None]]:
    """‖w_k − w‖ and ‖w_k − w‖ / ‖w‖ for every region of the model that has parameters, and for the whole."""
    moved, size = dict.fromkeys(REGIONS, 0.0), dict.fromkeys(REGIONS, 0.0)
    for key, w in start.items():
        region = layout.region(key)
        moved[region] += float((local[key].double() - w.double()).square().sum())
        size[region] += float(w.double().square().sum())
    regions = {r for key in start if (r := layout.region(key))}
    out = {r: _lengths(moved[r], size[r]) for r in REGIONS if r in regions}
    return {**out, "whole": _lengths(sum(moved.values()), sum(size.values()))}


def _lengths(moved: float, size: float) -> dict[str, float | None]:
    return {"absolute": math.sqrt(moved), "relative": math.sqrt(moved / size) if size else None}
