"""How a run goes on, shown on standard error: a bar, the latest scores, warnings."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..core.federation import Federation
from .result import headline
from .run import Listener


def progress_bar() -> Progress:
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False),
                    console=Console(stderr=True, highlight=False), transient=False)


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
