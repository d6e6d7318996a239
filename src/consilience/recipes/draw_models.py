"""Pictures that ask trained models: maps of their features, and which classes a client's model answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import rng
from ..errors import ConsilienceError
from ..metrics.gather import Answers, Asked, gather
from ..metrics.subject import Subject
from ..report.features import choose_samples, embed
from ..report.gather import Group
from ..runs.reload import OpenedRun
from .folders import opened
from .format import Column, Drawing
from .outcome import Entry
from .svg import Line, Points, draw_lines, draw_points

Columns = Iterable[tuple[Column, Sequence[tuple[Entry, Group]]]]
Heading = Callable[[Column], str]
Chosen = list[tuple[int, Tensor]]              # clients and rows of theirs
EVERYTHING = 1 << 40
_WHAT = {"global": "without personal tensors", "personalised": "as served"}


@dataclass(frozen=True)
class _Panel:
    """Features before they are embedded."""

    title: str
    features: Tensor
    label: list[int]
    owner: list[int]


@dataclass(frozen=True)
class _Row:
    """The panels of one run."""

    title: str
    seed: int
    panels: list[_Panel]


# ---- features --------------------------------------------------------------------------------------------------------

def map_pictures(columns: Columns, drawing: Drawing, heading: Heading, samples: int) -> Iterator[tuple[str, str]]:
    """t-SNE of features, a picture per column; colour and shape tell class and client apart."""
    for column, own in columns:
        rows = [_row(group.runs[0].path, e.cell.row.title, drawing, samples) for e, group in own if group.runs[0].path.is_dir()]
        if rows:
            caption, points = _embedded(rows, drawing)
            yield column.name, draw_points(points, heading(column), caption)


def _row(path: Path, title: str, drawing: Drawing, samples: int) -> _Row:
    with opened(path) as run:
        subject, seed = Subject(run.federation, run.data), run.config.policy.seed
        chosen = choose_samples(run.data, samples, seed)
        panels = _of_client(subject, chosen, title, drawing) if drawing.client else _of_all(subject, run, chosen, title, drawing)
        return _Row(title, seed, panels)


def _of_all(subject: Subject, run: OpenedRun, chosen: Chosen, title: str, drawing: Drawing) -> list[_Panel]:
    """Every client's samples through the model it has: a panel for each model and moment."""
    kinds = ["global", "personalised"] if drawing.model == "both" and run.federation.personal else \
        ["personalised" if drawing.model == "both" else drawing.model]
    return [_panel(subject, [Asked(*subject.model_of(i, kind, training), rows, i) for i, rows in chosen], chosen,
                   f"{title}\n{_WHAT[kind]}, {training} local training") for kind in kinds for training in drawing.training]


def _of_client(subject: Subject, chosen: Chosen, title: str, drawing: Drawing) -> list[_Panel]:
    """One client's model: as it received it and as it trained it on its own samples, and the trained one on the others' samples."""
    owner, kind = subject.choose_client(drawing.client), "personalised" if drawing.model == "both" else drawing.model
    name, own, others = subject.names[owner], [c for c in chosen if c[0] == owner], [c for c in chosen if c[0] != owner]
    shown = [("before", own, f"the model {name} received, on its own samples"),
             ("after", own, f"the model {name} trained, on its own samples"),
             ("after", others, f"the model {name} trained, on the others' samples")]
    return [_panel(subject, [Asked(*subject.model_of(owner, kind, training), rows, i) for i, rows in where], where, f"{title}\n{what}",
                   [i for i, _ in chosen])
            for training, where, what in shown if where]


def _panel(subject: Subject, asked: Sequence[Asked], chosen: Chosen, title: str, clients: Sequence[int] | None = None) -> _Panel:
    """`clients` gives a client the same colour or mark in all panels; without it those in the panel count."""
    place = {client: n for n, client in enumerate(clients if clients is not None else [i for i, _ in chosen])}
    answers = gather(subject.fed, asked, "features")
    return _Panel(title, answers.values, answers.y.tolist(), [place[i] for i in answers.owner.tolist()])


def _embedded(rows: Sequence[_Row], drawing: Drawing) -> tuple[str, list[Points]]:
    """Panels that are embedded together lie in one plane, so that their points can be compared; and a line that says which are."""
    groups = {"row": [(r.title, r.seed, r.panels) for r in rows],
              "figure": [("all rows", rows[0].seed, [p for r in rows for p in r.panels])],
              "panel": [(r.title, r.seed, [p]) for r in rows for p in r.panels]}[drawing.together]
    points, said = [], []
    for title, seed, panels in groups:
        widths = {p.features.shape[1] for p in panels}
        if len(widths) > 1:
            raise ConsilienceError(f"features of {' and '.join(map(str, sorted(widths)))} numbers cannot be embedded together. "
                                   'Set together = "row" in the drawing.')
        at = embed(torch.cat([p.features for p in panels]), rng.key(seed, "report", "map")).tolist()
        said.append(f"{title}, {len(panels)} panel{'s' if len(panels) > 1 else ''}, {len(at)} points")
        for p in panels:
            own, at = at[: len(p.label)], at[len(p.label):]
            colour, shape = (p.label, p.owner) if drawing.colour == "class" else (p.owner, p.label)
            points.append(Points(p.title, [(float(x), float(y)) for x, y in own], colour, shape))
    return ("One t-SNE for every panel." if drawing.together == "panel" else f"One t-SNE for: {'; '.join(said)}."), points


# ---- predicted classes -----------------------------------------------------------------------------------------------

def predicted_pictures(columns: Columns, drawing: Drawing, heading: Heading) -> Iterator[tuple[str, str]]:
    """How often the model that a client has trained answers with each class on the other clients' samples; and what it answers on one."""
    for column, own in columns:
        lines: list[Line] = []
        single: list[Line] = []
        for e, group in own:
            if not group.runs[0].path.is_dir():
                continue
            with opened(group.runs[0].path) as run:
                subject = Subject(run.federation, run.data)
                owner = subject.choose_client(drawing.client)
                answers, name = _answers_on_others(subject, owner, drawing, run.config.policy.seed), subject.names[owner]
            across = list(range(run.data.classes))
            if not lines:
                lines.append(Line("labels of the samples", across, _shares(answers.y, len(across))))
            lines.append(Line(e.cell.row.title, across, _shares(answers.predicted, len(across))))
            place = next((i for i, label in enumerate(answers.y.tolist()) if label == drawing.sample_class), None)
            if place is not None:
                single.append(Line(e.cell.row.title, across, answers.probabilities[place].tolist()))
        if lines:
            marks, model = [str(c) for c in across], f"the model {name} trained"
            yield f"{column.name}-all", draw_lines(lines, f"{heading(column)}: {model}, on the others' samples", "class",
                                                   "share of the answers", marks)
        if single:
            yield f"{column.name}-one", draw_lines(single, f"{heading(column)}: {model}, on one sample of class {drawing.sample_class}",
                                                   "class", "probability", marks)


def _answers_on_others(subject: Subject, owner: int, drawing: Drawing, seed: int) -> Answers:
    kind = "personalised" if drawing.model == "both" else drawing.model
    others = [c for c in choose_samples(subject.data, EVERYTHING, seed) if c[0] != owner]
    answers = gather(subject.fed, [Asked(*subject.model_of(owner, kind, "after"), rows, i) for i, rows in others])
    if not len(answers):
        raise ConsilienceError("there is no other client to take samples from.")
    return answers


def _shares(classes: Tensor, count: int) -> list[float]:
    return (classes.bincount(minlength=count).double() / len(classes)).tolist()


__all__ = ["map_pictures", "predicted_pictures"]
