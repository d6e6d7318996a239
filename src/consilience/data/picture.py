"""A picture of a split: clients across, classes up, the area of a circle is the number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ConfigError, ConsilienceError
from .federated import FederatedData
from .statistics import count_labels, effective_classes, rows_of, total_variation

FORMATS = (".png", ".svg", ".pdf")
MOST_CLIENTS = 200                       # more are not legible; the picture says how many it leaves out
_INK, _GRID, _TEXT = "#2563a8", "#e4e4e4", "#333333"


def draw_split(data: FederatedData, path: str | Path, part: str = "all", class_names: Sequence[str] = (),
               title: str | None = None, dpi: int = 100) -> Path:
    """Write the picture of a federated data set to `path` (.png, .svg or .pdf) and return the path."""
    counts = count_labels(data.y, rows_of(data, part), data.classes)
    names = data.table.names
    return draw_counts(counts, names, path, class_names, title or f"{data.name}: {data.description.get('split', 'split')}", dpi)


def draw_counts(counts: Tensor, names: Sequence[str], path: str | Path, class_names: Sequence[str] = (),
                title: str = "", dpi: int = 100) -> Path:
    """The same for a table of clients × classes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConsilienceError("Drawing a split needs matplotlib, which is not installed: pip install matplotlib.") from None
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"The picture's file name must end in {', '.join(FORMATS)}. Got {str(path)!r} instead.")
    shown = min(len(counts), MOST_CLIENTS)
    table, classes = counts[:shown].numpy(), counts.shape[1]

    # A cell is as large as the page allows. Room beside the cells, in inches, is for names, title and the key.
    client_labels, class_labels = _short(names[:shown]), list(class_names) or [str(c) for c in range(classes)]
    cell = float(np.clip(9.0 / max(shown, classes), 0.095, 0.38))
    left, bottom = 0.45 + 0.065 * max(map(len, class_labels)), 0.42 + 0.062 * _longest(client_labels)
    right, top = 1.15, 0.62
    width, height = max(shown * cell, 3.0), max(classes * cell, 1.3)
    page_width, page_height = left + width + right, bottom + height + top
    figure = Figure(figsize=(page_width, page_height), dpi=dpi)
    axes = figure.add_axes((left / page_width, bottom / page_height, width / page_width, height / page_height))

    # Scatter sizes are squared diameters in points. The largest circle just fits into a cell; where cells are tiny it may
    # reach into the next ones, or the small circles would vanish.
    narrow = min(width / shown, height / classes)
    fits = min(narrow * (0.92 if narrow > 0.2 else 1.5), 0.36) * 72
    most = max(int(table.max()), 1)
    client, label = np.nonzero(table)
    axes.scatter(client, label, s=fits**2 * table[client, label] / most, color=_INK, alpha=0.85, linewidths=0, zorder=2)
    axes.set_xlim(-0.5, shown - 0.5)
    axes.set_ylim(-0.5, classes - 0.5)
    _ticks(axes.xaxis, client_labels, width / shown)
    _ticks(axes.yaxis, class_labels, height / classes)
    if _longest(client_labels):
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("client", fontsize=9, color=_TEXT)
    axes.set_ylabel("class", fontsize=9, color=_TEXT)
    axes.grid(color=_GRID, linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7, length=0, labelcolor=_TEXT)
    for side in axes.spines.values():
        side.set_color(_GRID)

    sizes = counts.sum(1)
    note = (f"{len(counts)} clients, {int(sizes.sum())} samples; {int(sizes.min())} to {int(sizes.max())} per client; "
            f"effective classes {float(effective_classes(counts).mean()):.2f}; "
            f"distance from pooled labels {float(total_variation(counts).mean()):.2f}")
    if shown < len(counts):
        note += f"; the first {shown} are shown"
    text_left, chars = 0.1 / page_width, int((page_width - 0.2) / 0.062)
    figure.text(text_left, 1 - 0.08 / page_height, _fit(title, int(chars * 0.72)), fontsize=10, va="top", color=_TEXT)
    figure.text(text_left, 1 - 0.28 / page_height, _wrap(note, chars), fontsize=7, va="top", color=_TEXT, linespacing=1.25)
    _key(figure, most, fits, left + width, bottom, height, (page_width, page_height))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _key(figure: Any, most: int, fits: float, at: float, bottom: float, height: float, page: tuple[float, float]) -> None:
    """Circles of known size beside the cells."""
    samples = sorted({_round_down(most * share) for share in (1.0, 0.5, 0.2, 0.05)}, reverse=True)
    key = figure.add_axes(((at + 0.05) / page[0], bottom / page[1], 1.05 / page[0], height / page[1]))
    key.set_axis_off()
    key.set_xlim(0, 1.05 * 72)
    key.set_ylim(0, height * 72)
    room = max(fits + 2, 11.0)
    y = height * 72 - 6
    key.text(4, y, "samples", fontsize=7, va="center", color=_TEXT)
    for n in samples:
        y -= room
        if y < 4:
            break
        key.scatter([4 + fits / 2], [y], s=fits**2 * n / most, color=_INK, alpha=0.85, linewidths=0)
        key.text(10 + fits, y, str(n), fontsize=7, va="center", color=_TEXT)


def _ticks(axis: Any, labels: Sequence[str], inches: float) -> None:
    """Every label where there is room for it; else every 2nd, 5th, 10th, …"""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s * inches >= 0.16)
    axis.set_ticks(range(0, len(labels), step), [labels[i] for i in range(0, len(labels), step)])


def _short(names: Sequence[str]) -> list[str]:
    """client07 is shown as 7; names that mean something as they are, cut at 24 letters."""
    numbers = [n.removeprefix("client") for n in names]
    if all(n.isdigit() for n in numbers):
        return [str(int(n)) for n in numbers]
    return [n if len(n) <= 24 else n[:23] + "…" for n in names]


def _longest(labels: Sequence[str]) -> int:
    """Letters of the longest label when they must stand upright; 0 when they are short enough to lie."""
    longest = max(map(len, labels))
    return longest if longest > 3 else 0


def _round_down(value: float) -> int:
    """To two leading digits, so that the key shows round numbers."""
    value = max(int(value), 1)
    unit = 10 ** max(len(str(value)) - 2, 0)
    return value // unit * unit


def _fit(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(letters - 1, 1)] + "…"


def _wrap(text: str, letters: int) -> str:
    """At most two lines, broken between the facts."""
    lines = [""]
    for fact in text.split("; "):
        if lines[-1] and len(lines[-1]) + len(fact) + 2 > letters:
            lines.append("")
        lines[-1] += ("; " if lines[-1] else "") + fact
    return "\n".join(lines)
