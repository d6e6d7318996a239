"""CKA and KL to the received model during local training, from a run's measures.json (`consilience measure DIR cka kl`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .gather import Group


def draw_traces(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One entry for each trace of each run: what the page needs to draw. Entries with one `label` share a figure."""
    return [{"group": number, "seed": run.seed, **trace}
            for number, group in enumerate(groups) for run in group.runs for trace in find_traces(run.measures)]


def find_traces(measures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every list of numbers beside the steps in the traces of cka and kl. Anything of another form is passed over."""
    out = []
    for name in ("cka", "kl"):
        entry = measures.get(name)
        result = entry.get("result") if isinstance(entry, Mapping) else None
        trace = result.get("trace") if isinstance(result, Mapping) else None
        if not isinstance(result, Mapping) or not isinstance(trace, Mapping) or not _is_numbers(trace.get("step")):
            continue
        for what, values in trace.items():
            if what != "step" and _is_numbers(values) and len(values) == len(trace["step"]):
                label = (f"{result.get('kernel', 'linear')} CKA of {result.get('point', 'logits')} with the received model"
                         if name == "cka" else f"KL({what.replace('||', ' ‖ ')}), nats")
                out.append({"label": label, "client": str(result.get("client", "")), "x": list(trace["step"]),
                            "y": [_finite(v) for v in values]})
    return out


def _is_numbers(value: Any) -> bool:
    number = lambda v: v is None or (isinstance(v, (int, float)) and not isinstance(v, bool))
    return isinstance(value, list) and len(value) > 0 and all(map(number, value))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
