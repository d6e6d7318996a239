"""`consilience measure`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..metrics.registry import describe_measures, make_measures
from ..report.tables import FORMATS, Table
from ..runs.config import parse_set
from ..runs.files import DiskError
from ..runs.measure import measure as measure_run
from ..runs.measure import save_measures, table_of
from ..runs.progress import progress_bar
from ..runs.reload import open_run
from .output import AsJson, Format, print_json, print_table, warn
from .settings import DataDir


def measure(folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="The run's folder.", show_default=False)] = None,
            names: Annotated[list[str] | None, typer.Argument(help="Measures, as in mdl cka; without names, all that are quick.",
                                                              show_default=False)] = None,
            set_: Annotated[list[str] | None, typer.Option("--set", help="An option of a measure, as in mdl.steps=500. "
                                                                         "May be repeated.")] = None,
            reference: Annotated[Path | None, typer.Option("--reference", help="Folder of a run to compare with.")] = None,
            data_dir: DataDir = None,
            list_: Annotated[bool, typer.Option("--list", help="List the measures and their options.")] = False,
            form: Format = "text", as_json: AsJson = False) -> None:
    """Measure what a run has trained. Results are printed and added to DIR/measures.json."""
    if form not in FORMATS:
        Table([], []).render(form)                                # says which there are, before anything is measured
    if list_:
        return _print_list(form, as_json)
    if folder is None:
        raise ConfigError("Name the folder of a run, as in consilience measure runs/mine mdl cka, or use --list.")
    options = parse_set(set_ or [])
    if names:
        make_measures(names, options)                             # a wrong name is said before data are read
    opened = open_run(folder, str(data_dir) if data_dir else None)
    refused: list[DiskError] = []

    def keep(path: Path, entry: Mapping[str, Any]) -> None:
        try:
            save_measures(path, entry)
        except DiskError as error:                                # what was measured is still printed
            refused.append(error)

    with progress_bar() as bar:
        task = bar.add_task("measuring", total=None, note="")

        def tell(name: str, what: str, done: int, of: int) -> None:
            bar.update(task, description=name, completed=done, total=of, note=what)
        entries = measure_run(opened, names or [], options, reference=reference, tell=tell, keep=keep)
        bar.update(task, description="measured", completed=1, total=1, note=f"{len(entries)} measure{'s' * (len(entries) != 1)}")
    if as_json:
        print_json(entries)
    else:
        title = f"{opened.config.stack().canonical} on {opened.data.name}, round {opened.federation.round_number}"
        print_table(table_of(entries, title), form)
    if refused:
        warn(f"Not kept in the folder. {refused[-1]}")


def _print_list(form: str, as_json: bool) -> None:
    rows = describe_measures()
    if as_json:
        return print_json(rows)
    body = []
    for row in rows:
        options = ", ".join(f"{o['name']}={o['default']!r}" for o in row["options"])
        body.append([row["name"], row["meaning"], options])
    print_table(Table(["measure", "what it says", "options"], body, data=rows), form)
