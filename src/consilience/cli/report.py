"""`consilience report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..report.features import MOST_SAMPLES
from ..report.gather import gather
from ..report.report import write_report
from ..runs.progress import progress_bar
from .output import AsJson, out, print_json, warn
from .settings import DataDir


def report(folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or folders with runs below them.",
                                                         show_default=False)],
           out_: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
           title: Annotated[str | None, typer.Option("--title", help="The page's title.")] = None,
           reference: Annotated[str | None, typer.Option("--reference", help="Method the others are compared with; fedavg if it is "
                                                                             "among them.")] = None,
           features: Annotated[bool, typer.Option("--features", help="Add feature maps. Each method's first run is opened and its "
                                                                     "clients train for a round, so this takes time.")] = False,
           samples: Annotated[int, typer.Option("--samples", help="Samples in a feature map.", min=10, max=5000)] = MOST_SAMPLES,
           data_dir: DataDir = None,
           as_json: AsJson = False) -> None:
    """Make one HTML page from runs. It shows curves, tables, clients, splits and settings, and loads nothing else."""
    gathered = gather(folders)
    with progress_bar() as bar:
        task = bar.add_task("report", total=1 + (4 * len(gathered.groups) if features else 0), note="reading records and data")
        path = write_report(folders, out_, title=title, reference=reference, features=features, samples=samples,
                            data_dir=str(data_dir) if data_dir else None, gathered=gathered,
                            tick=lambda note: bar.update(task, advance=1, note=note))
        bar.update(task, completed=bar.tasks[0].total, note="done")
    for note in gathered.notes:
        warn(note)
    facts = {"report": str(path), "bytes": path.stat().st_size, "runs": len(gathered.runs),
             "methods": [g.label for g in gathered.groups], "notes": gathered.notes}
    if as_json:
        print_json(facts)
    else:
        runs = f"{facts['runs']} run{'' if facts['runs'] == 1 else 's'}"
        methods = ", ".join(g.label for g in gathered.groups)
        out().print(f"Wrote {path} ({path.stat().st_size / 1000:.0f} kB): {runs} of {methods}.", markup=False)
