"""Pages of results to keep: made from records as CSV alone, so that anyone can make them again; what people wrote on them stays."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..report.gather import Group, StoredRun
from ..report.reproduce import command_of, environments
from ..report.tables import Table
from ..runs.files import write_bytes
from .collect import collect
from .folders import known_measures
from .orders import Order
from .outcome import LABEL_END, Entry, Outcome, grouped
from .records import csv_of, keep_as_csv, read_csv_run

RECORDS = "records"
WORDS = ("<!-- words: what stands between these marks is written by hand and kept -->", "<!-- end of words -->")
PAGES = ("<!-- pages: made by `consilience reproduce … --results` -->", "<!-- end of pages -->")
NOTHING_YET = "Not written yet."


def page_name(outcome: Outcome) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", outcome.recipe.name.removesuffix(".toml").lower()).strip("-")
    scaled = f"-rounds-x{outcome.scale:g}" if outcome.scale != 1.0 else ""
    return plain + scaled + "".join(f"-{name}-{value}" for name, value in outcome.changed)


def write_results(outcome: Outcome, order: Order, into: str | Path, drawn_in: Path | None = None) -> Path | None:
    """Add the runs of an outcome to the records in `into`, and make the recipe's page of all that the records hold.

    None where they hold nothing of it: a page without a number helps nobody.
    """
    into = Path(into)
    for run in {r.path: r for e in outcome.entries for r in e.runs.values() if r.path.is_dir() and r.records}.values():
        _keep(run, into / RECORDS)
    kept = collect(outcome.recipe, into / RECORDS, order)
    if not any(e.came_out for e in kept.entries):
        return None
    name = page_name(kept)
    for figure in outcome.figures if drawn_in is not None else ():
        (into / "figures" / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(drawn_in or ".") / figure, into / "figures" / name / Path(figure).name)
    kept.figures = [f"figures/{name}/{p.name}" for p in sorted((into / "figures" / name).glob("*.svg"))]
    file = into / f"{name}.md"
    write_bytes(file, results_page(kept, _words(file)).encode())
    _list_pages(into)
    return file


def _keep(run: StoredRun, records: Path) -> None:
    """Records that go further are kept: a run that was cut off here may have been finished elsewhere."""
    old = read_csv_run(records / run.path.name)
    far = lambda r: (r.stopped is not None, r.records[-1]["round"] if r.records else 0)
    if old is None or far(run) >= far(old):
        keep_as_csv(run, known_measures(run.path) or (old.measures if old else {}), records)


def _words(file: Path) -> str:
    """What people wrote on a page."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if all(mark in text for mark in WORDS):
        return text.partition(WORDS[0])[2].partition(WORDS[1])[0].strip()
    return NOTHING_YET


def results_page(outcome: Outcome, words: str) -> str:
    r = outcome.recipe
    shown = [e for c in r.columns for e in outcome.entries if e.cell.column.name == c.name and e.came_out]
    parts = [f"# {r.name}: {r.title}", f"> **{outcome.label}.**" if outcome.label else "", f"{r.citation}." if r.citation else "",
             f"Made from the records by consilience {__version__}. `{outcome.command}` runs it, and with `--report-only --results` "
             "makes this page."]
    if shown:
        whole = outcome.table(sorted({e.cell.row.name for e in shown}), sorted({e.cell.column.name for e in shown}))
        seconds = {(e.cell.row.name, e.cell.column.name): _seconds(e) for e in shown}
        chosen = [(row, s) for row, e in zip(whole.rows, whole.data) if (s := seconds.get((e["row"], e["column"])))]
        table = Table([*whole.header, "seconds"], [[*row, s] for row, s in chosen])
        parts += ["## Paper, ours, difference", table.markdown(),
                  "\n".join(f"- {n}" for n in outcome.notes(shown) if not n.startswith("Unavailable"))]
    parts += ["## What came out, and what did not", WORDS[0], words, WORDS[1]]
    missing = _not_reached(outcome, shown)
    parts += ["## Not reached", "\n".join(f"- {line}" for line in missing)] if missing else []
    parts += ["## Figures", *(f"![{Path(f).stem}]({f})" for f in outcome.figures)] if outcome.figures else []
    for title, lines in (("Readings", r.readings), ("Notes", r.notes)):
        parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []
    runs = list({run.path: run for e in shown for run in e.runs.values()}.values())
    if runs:
        parts += ["## Runs", _runs(shown).markdown(), "```sh\n" + "\n".join(command_of(run) for run in runs) + "\n```"]
        where = environments([Group("all", tuple(runs))])
        parts += ["## Machines", "\n".join(f"- {line}" for line in where)] if where else []
    return "\n\n".join(p for p in parts if p) + "\n"


def _seconds(e: Entry) -> str:
    each = [sum((r.get("measured") or {}).get("seconds", 0.0) for r in run.records) for run in e.runs.values()]
    return f"{sum(each) / len(each):.0f}" if each else "–"


def _not_reached(outcome: Outcome, shown: Sequence[Entry]) -> list[str]:
    """Cells that could be run and were not, row by row; then what cannot be had, with the reason."""
    there = {id(e) for e in shown}
    out = []
    for column in outcome.recipe.columns:
        left = [e.cell.row.title for e in outcome.entries if e.cell.column is column and id(e) not in there and not e.cell.unavailable]
        if left:
            out.append(f"{column.title}: not run: {', '.join(left)}.")
    whole = [e for e in outcome.entries if e.cell.unavailable]
    for e in whole:
        e.unavailable = e.cell.unavailable
    return out + [f"{', '.join(names)}: cannot be had: {reason}." for reason, names in grouped(whole).items()]


def _runs(shown: Sequence[Entry]) -> Table:
    """Every run once, with the cells it stands in."""
    rows: dict[Path, list[str]] = {}
    for e in shown:
        for run in e.runs.values():
            row = rows.setdefault(run.path, [f"[{run.path.name}]({RECORDS}/{run.path.name})", "", str(run.seed), "", "", ""])
            title = f"{e.cell.row.title}, {e.cell.column.title}"
            row[1] += ("; " if row[1] else "") + title
            row[3] = f"{run.records[-1]['round'] if run.records else 0} of {run.config.get('rounds', '?')}"
            row[4], row[5] = run.stopped or "cut off", str(run.about.get("hash") or "–")
    return Table(["records", "cells", "seed", "rounds", "ended", "split"], list(rows.values()))


def _label_of(page: str) -> str:
    """What a page says under its title of rounds and settings that are not the recipe's, in a few words."""
    found = re.match(r"# .*\n\n> \*\*(.+)\.\*\*\n", page)
    return f" ({found[1].removesuffix(LABEL_END)})" if found else ""


def _list_pages(into: Path) -> None:
    """The index: a line for every page, between marks in README.md."""
    lines = []
    for file in sorted(into.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if file.name == "README.md" or WORDS[0] not in text:
            continue
        title = text.partition("\n")[0].removeprefix("# ")
        table = text.partition("## Paper, ours, difference")[2].partition("\n## ")[0]
        cells = [line for line in table.splitlines() if line.startswith("|")]
        done = [line for line in cells[2:] if " at round " not in line]
        lines.append(f"| [{title}]({file.name}){_label_of(text)} | {len(done)} | {len(cells[2:]) - len(done)} |")
    table = "\n".join(["| page | cells with a value | cut off |", "|---|---|---|", *lines])
    readme = into / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else f"# Results\n\n{PAGES[0]}\n{PAGES[1]}\n"
    if not all(mark in text for mark in PAGES):
        text += f"\n{PAGES[0]}\n{PAGES[1]}\n"
    before, _, rest = text.partition(PAGES[0])
    write_bytes(readme, f"{before}{PAGES[0]}\n{table}\n{PAGES[1]}{rest.partition(PAGES[1])[2]}".encode())


__all__ = ["RECORDS", "csv_of", "page_name", "results_page", "write_results"]
