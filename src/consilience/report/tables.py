"""A table that can be had as Markdown, LaTeX, CSV, JSON, or on a terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table as RichTable

from ..errors import unknown

FORMATS = ("text", "markdown", "latex", "csv", "json")
_LATEX = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
          "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "−": r"$-$", "κ": r"$\kappa$",
          "μ": r"$\mu$", "λ": r"$\lambda$", "α": r"$\alpha$", "β": r"$\beta$", "τ": r"$\tau$", "≥": r"$\geq$", "≤": r"$\leq$",
          "<": "$<$", ">": "$>$"}
BOLD = "Bold: the highest mean of its column, as printed; gain and p say what a difference is worth. Rows that lack seeds are left out."


@dataclass
class Table:
    """Rows of text under a header. `data` holds the same as numbers, for JSON, and `numbers` one a cell, for CSV."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    data: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    best: Collection[tuple[int, int]] = ()        # cells, by row and column, that are bold where letters can be

    def render(self, form: str) -> str:
        if form not in FORMATS:
            raise unknown("table format", form, FORMATS)
        return {"text": self.plain, "markdown": self.markdown, "latex": self.latex, "csv": self.csv, "json": self.json}[form]()

    def plain(self) -> str:
        widths = [max(len(str(r[i])) for r in [self.header, *self.rows]) for i in range(len(self.header))]
        line = lambda cells: "  ".join(str(c).ljust(w) for c, w in zip(cells, widths)).rstrip()
        out = [line(self.header), "  ".join("-" * w for w in widths), *(line(r) for r in self.rows)]
        return "\n".join([*([self.title, ""] if self.title else []), *out, *(["", *self.notes] if self.notes else [])])

    def markdown(self, paragraphs: bool = False) -> str:
        """Notes are lines of one paragraph, or paragraphs of their own."""
        line = lambda cells: "| " + " | ".join(cells) + " |"
        safe = lambda text: str(text).replace("|", r"\|")
        out = [line(map(safe, self.header)), "|" + "---|" * len(self.header), *map(line, self._marked(safe, "**{}**".format))]
        notes = ("\n\n" if paragraphs else "\n").join(self._marked_notes())
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *out, *(["", notes] if notes else [])])

    def _marked(self, safe: Callable[[str], str], bold: Callable[[str], str]) -> list[list[str]]:
        return [[bold(safe(c)) if (i, j) in self.best else safe(c) for j, c in enumerate(row)] for i, row in enumerate(self.rows)]

    def _marked_notes(self) -> list[str]:
        """The notes of a form that has bold letters."""
        return [*self.notes, *([BOLD] if self.best else [])]

    def latex(self) -> str:
        """For the booktabs package."""
        minus = lambda text: re.sub(r"(?<![\w.)\]+-])-(?=\d)", "−", str(text))      # a hyphen would be printed short
        safe = lambda text: "".join(_LATEX.get(ch, ch) for ch in minus(text))
        line = lambda cells: " & ".join(cells) + r" \\"
        body = [r"\begin{tabular}{l" + "r" * (len(self.header) - 1) + "}", r"\toprule", line(map(safe, self.header)), r"\midrule",
                *map(line, self._marked(safe, r"\textbf{{{}}}".format)), r"\bottomrule", r"\end{tabular}"]
        comments = [f"% {line}" for note in self._marked_notes() for line in note.splitlines()]          # an error may have several
        return "\n".join([*([f"% {self.title}"] if self.title else []), *body, *comments])

    def csv(self) -> str:
        """For programs: a number a cell, nothing where there is none; what is printed where a table has no such numbers."""
        lines = [[*self.numbers[0]], *([*row.values()] for row in self.numbers)] if self.numbers else [self.header, *self.rows]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(lines)
        return out.getvalue().rstrip("\n")

    def json(self) -> str:
        return json.dumps(self.data or [dict(zip(self.header, r)) for r in self.rows], indent=1, default=list)

    def rich(self, width: int) -> RichTable:
        """For a terminal of that width. Where there is little room, cells are folded between words and the header anywhere: no number
        is ever cut."""
        table = RichTable(title=escape(self.title) or None, title_justify="left", caption=escape("\n".join(self.notes)) or None,
                          caption_justify="left", header_style="bold")
        widths = self._widths(width - 3 * len(self.header) - 1)
        for i, name in enumerate(self.header):
            table.add_column(escape(name), justify="left" if i == 0 else "right", overflow="fold", width=widths[i])
        for row in self.rows:
            table.add_row(*(escape(str(c)) for c in row))
        return table

    def _widths(self, room: int) -> list[int]:
        """Of the columns: as wide as they need to be, else the widest narrowed first, down to the longest word of their cells."""
        columns = [[str(row[i]) for row in self.rows] for i in range(len(self.header))]
        widths = [max(map(cell_len, [name, *cells])) for name, cells in zip(self.header, columns)]
        least = [max((cell_len(word) for cell in cells for word in cell.split()), default=1) for cells in columns]
        while sum(widths) > room and (wider := [i for i, w in enumerate(widths) if w > least[i]]):
            widths[max(wider, key=lambda i: widths[i])] -= 1
        return widths
