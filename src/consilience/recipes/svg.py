"""Small pictures as SVG text: lines over numbers, points in panels, circles in a grid. No dependency, equal input gives equal bytes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_FONT = 'font-family="sans-serif" fill="#333"'


@dataclass(frozen=True)
class Line:
    """A curve; points without a value are gaps."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Points:
    """A panel of coloured points in the unit square, under a title of one or two lines. `shape` picks one of six marks."""

    title: str
    at: Sequence[tuple[float, float]]
    colour: Sequence[int]
    shape: Sequence[int] = field(default_factory=tuple)


def _page(width: float, height: float, parts: Sequence[str]) -> str:
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                      f'viewBox="0 0 {width:g} {height:g}">', f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *parts,
                      "</svg>"]) + "\n"


def _say(x: float, y: float, text: str, size: int = 12, anchor: str = "start", turn: bool = False) -> str:
    rotate = f' transform="rotate(-90 {x:g} {y:g})"' if turn else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" {_FONT}{rotate}>{escape(text)}</text>'


def _heading(x: float, width: float, title: str, caption: str = "") -> tuple[list[str], float]:
    """Title and caption, broken into lines that fit, and how far those beyond the first push down what stands below."""
    lines, small = textwrap.wrap(title, max(20, int(width / 7.5))), textwrap.wrap(caption, max(25, int(width / 6)))
    down = 18.0 * max(0, len(lines) - 1)
    parts = [_say(x, 24 + 18 * i, line, 14) for i, line in enumerate(lines)]
    parts += [_say(x, 44 + down + 14 * i, line, 11) for i, line in enumerate(small)]
    return parts, down + 14.0 * max(0, len(small) - 1)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between the ends."""
    raw = (high - low) / 5 or 1.0
    size = 10 ** math.floor(math.log10(raw))
    step = min((m * size for m in (1, 2, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def draw_lines(lines: Sequence[Line], title: str, x_label: str, y_label: str, names: Sequence[str] = ()) -> str:
    """Curves in one frame. `names` are the marks of the x axis where it has words instead of numbers."""
    known = [(x, y) for line in lines for x, y in zip(line.x, line.y) if y is not None]
    if not known:
        return _page(400, 60, [_say(10, 35, f"{title}: no values")])
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*known))
    x1, pad = (x1 if x1 > x0 else x0 + 1), ((y1 - y0) or abs(y1) or 1.0) * 0.05
    y0, y1 = y0 - pad, y1 + pad
    right = 20 + max((7 * len(line.label) for line in lines), default=0)
    left, width, height = 70.0, 560.0, 320.0
    parts, down = _heading(left, width + 33 + right, title)
    top = 40.0 + down
    px = lambda x: left + (x - x0) / (x1 - x0) * width
    py = lambda y: top + height - (y - y0) / (y1 - y0) * height
    parts += [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for tick in _ticks(y0, y1):
        parts += [f'<line x1="{left}" x2="{left + width}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" stroke="#eee"/>',
                  _say(left - 6, py(tick) + 4, f"{tick:g}", 11, "end")]
    marks = list(enumerate(names)) if names else [(t, f"{t:g}") for t in _ticks(x0, x1)]
    parts += [_say(px(t), top + height + 16, text, 11, "middle") for t, text in marks]
    parts += [_say(left + width / 2, top + height + 36, x_label, 12, "middle"), _say(18, top + height / 2, y_label, 12, "middle", True)]
    for i, line in enumerate(lines):
        pieces: list[list[str]] = [[]]
        for x, y in zip(line.x, line.y):
            if y is None:
                pieces.append([])
            else:
                pieces[-1].append(f"{px(x):.1f},{py(y):.1f}")
        for piece in filter(None, pieces):
            parts.append(f'<polyline points="{" ".join(piece)}" fill="none" stroke="{_colour(i)}" stroke-width="1.6"/>')
            if len(piece) <= 12:
                parts += [f'<circle cx="{p.partition(",")[0]}" cy="{p.partition(",")[2]}" r="3" fill="{_colour(i)}"/>' for p in piece]
        y = top + 8 + 18 * i
        parts += [f'<line x1="{left + width + 10}" x2="{left + width + 28}" y1="{y}" y2="{y}" stroke="{_colour(i)}" stroke-width="2.5"/>',
                  _say(left + width + 33, y + 4, line.label, 11)]
    return _page(left + width + 33 + right, max(top + height + 50, top + 18 * len(lines) + 30), parts)


def _mark(x: float, y: float, shape: int, colour: str) -> str:
    r = 3.2
    fill = f'fill="{colour}" fill-opacity="0.8"'
    path = {1: f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z", 2: f"M{x:.1f} {y - r:.1f}l{r} {2 * r}h{-2 * r}z",
            3: f"M{x:.1f} {y - r:.1f}l{r} {r}l{-r} {r}l{-r} {-r}z", 4: f"M{x:.1f} {y + r:.1f}l{r} {-2 * r}h{-2 * r}z",
            5: f"M{x - 1:.1f} {y - r:.1f}h2v{2 * r}h-2z"}.get(shape % 6)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {fill}/>' if path is None else f'<path d="{path}" {fill}/>'


def draw_points(panels: Sequence[Points], title: str, caption: str = "") -> str:
    """Panels side by side, four in a row; the caption stands under the title."""
    side, gap, under, across = 260.0, 24.0, 54.0, min(len(panels), 4)
    parts, down = _heading(gap, across * (side + gap) - gap, title, caption)
    top = (88.0 if caption else 72.0) + down
    for n, panel in enumerate(panels):
        x0, y0 = gap + (n % 4) * (side + gap), top + (n // 4) * (side + under)
        above = panel.title.split("\n")
        parts += [_say(x0, y0 - 6 - 14 * (len(above) - 1 - i), line, 11) for i, line in enumerate(above)]
        parts += [f'<rect x="{x0}" y="{y0}" width="{side}" height="{side}" fill="none" stroke="#999"/>']
        shapes = panel.shape or [0] * len(panel.at)
        parts += [_mark(x0 + 8 + x * (side - 16), y0 + 8 + (1 - y) * (side - 16), s, _colour(c))
                  for (x, y), c, s in zip(panel.at, panel.colour, shapes)]
    return _page(gap + across * (side + gap), top + math.ceil(len(panels) / 4) * (side + under), parts)


def draw_grid(counts: Sequence[Sequence[int]], title: str, x_label: str = "client", y_label: str = "class") -> str:
    """Circles whose area is a count: clients across, classes up."""
    clients, classes = len(counts), max((len(row) for row in counts), default=0)
    cell = max(4.0, min(24.0, 700.0 / max(clients, classes, 1)))
    left, most, wide = 60.0, max((c for row in counts for c in row), default=1) or 1, max(clients * cell, 400.0)
    parts, down = _heading(left, wide, title)
    top = 40.0 + down
    parts += [_say(left + clients * cell / 2, top + classes * cell + 20, x_label, 12, "middle"),
             _say(24, top + classes * cell / 2, y_label, 12, "middle", True),
             f'<rect x="{left}" y="{top}" width="{clients * cell:g}" height="{classes * cell:g}" fill="none" stroke="#999"/>']
    for i, row in enumerate(counts):
        parts += [f'<circle cx="{left + (i + 0.5) * cell:.1f}" cy="{top + (classes - 0.5 - c) * cell:.1f}" '
                  f'r="{max(0.4, 0.5 * cell * math.sqrt(n / most)):.2f}" fill="{COLOURS[0]}" fill-opacity="0.85"/>'
                  for c, n in enumerate(row) if n]
    return _page(left + wide + 20, top + classes * cell + 40, parts)
