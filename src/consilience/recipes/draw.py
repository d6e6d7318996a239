"""Pictures of a recipe, from its runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..data.statistics import count_labels, rows_of
from ..errors import ConsilienceError
from ..report.curves import draw_curves
from ..report.gather import Group
from ..runs.config import RunConfig
from ..runs.files import write_bytes
from ..runs.run import load_data
from .collect import obstacle
from .draw_models import map_pictures, predicted_pictures
from .folders import known_measures
from .format import Column, Drawing
from .outcome import Entry, Outcome
from .run import data_in
from .svg import Line, draw_grid, draw_lines

FOLDER = "figures"
SAMPLES = 500
Tell = Callable[[str], None]


def draw(outcome: Outcome, out: str | Path, *, data_dir: str | Path | None = None, until: float | None = None,
         tell: Tell = lambda what: None) -> list[str]:
    """Write every picture the recipe asks for into `out`/figures; the outcome remembers their names. One that fails stops no other.

    After the time `until` (of `time.time`) those that need trained models are left for another time.
    """
    scaled = f" [{outcome.label}]" if outcome.label else ""
    with data_in(data_dir):
        for number, drawing in enumerate(outcome.recipe.drawings, start=1):
            if drawing.kind in ("features", "predicted") and until is not None and time.time() >= until:
                outcome.remarks.append(f"No {drawing.kind} picture: there was no time left.")
                continue
            tell(f"drawing {drawing.kind}")
            pictures = {"curves": _curves, "bars": _bars, "trace": _trace, "features": _features,
                        "predicted": _predicted, "splits": _splits}[drawing.kind]
            try:
                for name, svg in pictures(outcome, drawing, scaled):
                    plain = re.sub(r"[^a-z0-9]+", "-", f"{number}-{drawing.kind}-{name}".lower()).strip("-")
                    write_bytes(Path(out) / FOLDER / f"{plain}.svg", svg.encode())
                    outcome.figures.append(f"{FOLDER}/{plain}.svg")
            except ConsilienceError as error:
                outcome.remarks.append(f"No {drawing.kind} picture: {error}")
    return outcome.figures


Pictures = Iterator[tuple[str, str]]


def _columns(outcome: Outcome) -> Iterator[tuple[Column, list[tuple[Entry, Group]]]]:
    """Columns with their runs, cut off ones too, a group of seeds per row. Rows and columns that differ in scoring alone come once."""
    shown: set[Path] = set()
    for column in outcome.recipe.columns:
        out = []
        for e in outcome.entries:
            runs = tuple(r for r in e.runs.values() if r.scored)
            if e.cell.column is column and runs and runs[0].path not in shown:
                shown.add(runs[0].path)
                out.append((e, Group(e.cell.row.title, runs)))
        if out:
            yield column, out


def _curves(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    """A score over rounds, mean over seeds."""
    for column, own in _columns(outcome):
        lines = []
        drawn = draw_curves([group for _, group in own])
        label = next((m["label"] for m in drawn["measures"] if m["name"] == drawing.y), drawing.y)
        for group in drawn["groups"]:
            one = group["mean"] if group["mean"] else group["runs"][0]
            values = one["y"].get(drawing.y)
            if values is not None:
                lines.append(Line(group["label"], one[drawing.x], values["mean"] if isinstance(values, dict) else values))
        title = f"{drawing.title or outcome.recipe.title}, {column.title}{scaled}"
        across = {"round": "round", "seconds": "seconds of training and scoring", "bytes": "bytes sent, up and down"}[drawing.x]
        yield f"{column.name}-{drawing.y}" + (f"-{drawing.x}" if drawing.x != "round" else ""), draw_lines(lines, title, across, label)


def _bars(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    """The cells' values, a line per row over the columns."""
    columns = [c for c in outcome.recipe.columns if (not drawing.columns or c.name in drawing.columns)
               and any(e.values for e in outcome.entries if e.cell.column is c)]
    if not columns:
        return
    numbers = all(c.x is not None for c in columns)
    at = {c.name: float(c.x if numbers and c.x is not None else i) for i, c in enumerate(columns)}
    lines = []
    for row in outcome.recipe.rows:
        own = [(at[e.cell.column.name], e.ours.mean) for e in outcome.entries if e.cell.row is row and e.ours and e.cell.column.name in at]
        if own:
            lines.append(Line(row.title, [x for x, _ in own], [y for _, y in own]))
    title, label = (drawing.title or outcome.recipe.title) + scaled, drawing.y if drawing.y != "personalised" else ""
    yield "-".join(drawing.columns[:1]) or "all", draw_lines(lines, title, "", label, () if numbers else [c.title for c in columns])


def _trace(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    """A measure along local training, the first seed of every row."""
    for column, own in _columns(outcome):
        lines = []
        for e, group in own:
            trace = known_measures(group.runs[0].path).get(drawing.measure, {}).get("result", {}).get("trace", {})
            if drawing.y in trace:
                lines.append(Line(e.cell.row.title, trace["step"], trace[drawing.y]))
        if lines:
            yield f"{column.name}-{drawing.y}", draw_lines(lines, f"{drawing.title or drawing.measure}, {column.title}{scaled}",
                                                           "local step", drawing.y)


def _features(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    return map_pictures(_columns(outcome), drawing, _heading(outcome, drawing, scaled), SAMPLES)


def _predicted(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    return predicted_pictures(_columns(outcome), drawing, _heading(outcome, drawing, scaled))


def _heading(outcome: Outcome, drawing: Drawing, scaled: str) -> Callable[[Column], str]:
    return lambda column: f"{drawing.title or outcome.recipe.title}, {column.title}{scaled}"


def _splits(outcome: Outcome, drawing: Drawing, scaled: str) -> Pictures:
    """Samples of every class on every client. Nothing is trained, so nothing is scaled."""
    seen: set[str] = set()
    for column in outcome.recipe.columns:
        own = [c for c in outcome.recipe.cells if c.column is column]
        cell = next((c for c in own if not obstacle(c)), None)
        if cell is None:
            outcome.remarks.append(f"No picture of {column.title}: {obstacle(own[0])}.")
            continue
        data = load_data(RunConfig.make({**(cell.values or {}), "seed": outcome.seeds[0]}))
        if data.split_hash() not in seen:
            seen.add(data.split_hash())
            counts = count_labels(data.y, rows_of(data), data.classes).tolist()
            yield column.name, draw_grid(counts, f"{drawing.title or outcome.recipe.title}, {column.title}")
