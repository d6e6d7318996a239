"""Printing: tables and JSON on standard output, progress and warnings on standard error."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..core.federation import Federation
from ..errors import unknown
from ..report.tables import FORMATS, Table
from ..runs.result import headline
from ..runs.run import Listener

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output and nothing else.")]


def _known_format(value: str) -> str:
    """Said before a command does its work, which may take hours."""
    if value not in FORMATS:
        raise unknown("table format", value, FORMATS)
    return value


Format = Annotated[str, typer.Option("--format", help=f"The table's form: {', '.join(FORMATS)}.", callback=_known_format)]


def out() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def err() -> Console:
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=1, default=list, allow_nan=False) + "\n")


def print_table(table: Table, form: str) -> None:
    if form == "text" and sys.stdout.isatty():
        out().print(table.rich())
    else:
        sys.stdout.write(table.render(form) + "\n")


def warn(message: str) -> None:
    err().print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)


def progress_bar() -> Progress:
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=err(), transient=False)


class RunProgress(Listener):
    """A bar over rounds with the latest scores, and the clients of the round under way."""

    def __init__(self, bar: Progress, label: str) -> None:
        self.bar, self.label = bar, label

    def started(self, federation: Federation, rounds: int, done: int) -> None:
        self.task = self.bar.add_task(self.label, total=rounds, completed=done, note="")

    def client_done(self, done: int, of: int) -> None:
        self.bar.update(self.task, description=f"{self.label} · client {done}/{of}")

    def round_done(self, record: dict[str, Any]) -> None:
        note = f"loss {record['loss']:.3f}" if record["loss"] is not None else ""
        score = headline(record).get("accuracy")
        self.bar.update(self.task, completed=record["round"], description=self.label,
                        note=note + (f" · accuracy {score:.3f}" if score is not None else ""))

    def noted(self, message: str) -> None:
        self.bar.console.print(f"[dim]{escape(message)}[/dim]", soft_wrap=True)

    def warned(self, message: str) -> None:
        self.bar.console.print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)
