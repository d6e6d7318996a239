"""What a reproduction leaves in its folder: the table in four forms, one JSON document, and a page to read."""

from __future__ import annotations

from pathlib import Path

from .. import __version__
from ..report.gather import Group, StoredRun
from ..report.report import write_report
from ..report.reproduce import command_of, environments
from ..report.tables import Table
from ..runs.files import write_bytes, write_json
from .outcome import Outcome

FILES = {"markdown": "table.md", "csv": "table.csv", "latex": "table.tex"}


def write_outcome(outcome: Outcome, out: str | Path) -> list[Path]:
    """table.md, table.csv, table.tex, table.json and result.md; returns their paths. Pictures of data alone have no table."""
    folder = Path(out)
    table = outcome.table()
    written = []
    for form, name in FILES.items() if outcome.entries else ():
        write_bytes(folder / name, (_text(table, form) + "\n").encode())
        written.append(folder / name)
    write_json(folder / "table.json", outcome.document())
    write_bytes(folder / "result.md", page(outcome).encode())
    return [*written, folder / "table.json", folder / "result.md"]


def write_html(outcome: Outcome, out: str | Path) -> Path | None:
    """One HTML page of all finished runs: curves, clients, splits. None where nothing is finished."""
    runs = (r for e in outcome.entries for r in e.runs.values())
    paths = list(dict.fromkeys(r.path for r in runs if r.stopped is not None and r.scored and r.path.is_dir()))
    if not paths:
        return None
    title = f"{outcome.recipe.name}: {outcome.recipe.title}" + (f" [{outcome.label}]" if outcome.label else "")
    return write_report(paths, Path(out) / "report.html", title=title)


def _text(table: Table, form: str) -> str:
    """Markdown keeps every note on a line of its own."""
    if form != "markdown":
        return table.render(form)
    return "\n\n".join([Table(table.header, table.rows, table.title).markdown(), *table.notes])


def page(outcome: Outcome) -> str:
    """The page: what came out, how it was read, and how to get it again."""
    r = outcome.recipe
    warning = [f"> **{outcome.label}.**"] if outcome.label else []
    parts = [f"# {r.name}: {r.title}", *warning, f"{r.citation}." if r.citation else "",
             f"Made with consilience {__version__}: `{outcome.command}`."]
    few = [s for s in r.seeds if s not in outcome.seeds]
    if few:
        parts.append(f"Asked for {len(outcome.seeds)} of the recipe's {len(r.seeds)} seeds.")
    if r.unavailable:
        parts.append(f"Unavailable: {r.unavailable}.")
    if outcome.entries:
        parts += ["## Paper, ours, difference", _text(outcome.table(), "markdown").partition("\n\n")[2]]
    elif outcome.remarks:
        parts += ["\n".join(f"- {line}" for line in outcome.remarks)]
    if outcome.figures:
        parts += ["## Figures", *(f"![{Path(f).stem}]({f})" for f in outcome.figures)]
    for title, lines in (("Readings", r.readings), ("Notes", r.notes)):
        if lines:
            parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
    runs = list({run.path: run for e in outcome.entries for run in e.runs.values()}.values())
    if runs:
        parts += ["## Runs", _runs_table(outcome, runs).markdown(), "## Commands of the single runs",
                  "```sh\n" + "\n".join(command_of(run) for run in runs) + "\n```"]
        where = environments([Group("all", tuple(runs))])
        if where:
            parts += ["## Machines", "\n".join(f"- {line}" for line in where)]
    failed = [f"- {e.cell.row.title}, {e.cell.column.title}, seed {seed}: {state}" for e in outcome.entries
              for seed, state in e.states.items() if state.startswith("failed")]
    if failed:
        parts += ["## Failures", "\n".join(failed)]
    return "\n\n".join(p for p in parts if p) + "\n"


def _runs_table(outcome: Outcome, runs: list[StoredRun]) -> Table:
    rows = []
    for run in runs:
        seconds = sum((r.get("measured") or {}).get("seconds", 0.0) for r in run.records)
        last = run.records[-1]["round"] if run.records else 0
        rows.append([f"runs/{run.path.name}", str(run.seed), f"{last} of {run.config.get('rounds', '?')}"
                     + (f" (scaled x{outcome.scale:g})" if outcome.scale != 1.0 else ""),
                     run.stopped or "not finished", str(run.about.get("hash", "")), f"{seconds:.1f}"])
    return Table(["folder", "seed", "rounds", "ended", "split", "seconds"], rows)
