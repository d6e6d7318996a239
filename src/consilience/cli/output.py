"""Printing: tables and JSON on standard output, progress and warnings on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import unknown
from ..report.tables import FORMATS, Table
from ..runs.files import DiskError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else.")]


_NO_EDGE = 100_000         # columns


def _known_format(value: str) -> str:
    """Said before a command does its work, which may take hours."""
    if value not in FORMATS:
        raise unknown("table format", value, FORMATS)
    return value


Format = Annotated[str, typer.Option("--format", help=f"The table's form: {', '.join(FORMATS)}.", callback=_known_format)]


def out() -> Console:
    """Standard output. What is not a terminal, as a file, has lines as long as they come: no cell of a table is folded there."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)           # :a: in a name is no sign for a picture
    return Console(highlight=False, emoji=False, soft_wrap=True, width=_NO_EDGE)


def err() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)


def print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=1, default=list, allow_nan=False) + "\n")


def print_table(table: Table, form: str) -> None:
    if form == "text" and sys.stdout.isatty():
        console = out()
        console.print(table.rich(console.width))
    else:
        sys.stdout.write(table.render(form) + "\n")


@contextmanager
def printed_first() -> Iterator[Callable[[Callable[[], object]], bool]]:
    """For files that are written after long work: gives a function to call what writes them, which says whether it could. Where the disk
    refuses, what the block prints is printed all the same, and the error comes after it.
    """
    refused: list[DiskError] = []

    def write(act: Callable[[], object]) -> bool:
        try:
            act()
            return True
        except DiskError as error:
            refused.append(error)
            return False
    try:
        yield write
    except typer.Exit:                        # runs that failed were said already
        if not refused:
            raise
    if refused:
        sys.stdout.flush()
        raise refused[0]


def warn(message: str) -> None:
    err().print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)
