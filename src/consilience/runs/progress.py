"""How a run goes on, shown on standard error: a bar, or lines in a log; the latest scores, warnings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..core.federation import Federation
from ..metrics.criterion import headline, measure_of
from .run import Listener

EVERY = 30.0                   # seconds between two lines of a log


def progress_bar() -> Progress:
    console = Console(stderr=True, highlight=False)
    kind = Progress if console.is_terminal or console.is_jupyter else _Lines
    return kind(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False), console=console, transient=False)


class _Lines(Progress):
    """Where a bar cannot be drawn over itself, as in the log of a batch job: a line now and then, and the bar at the end."""

    _told: float | None = None

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        now = self.get_time()
        if self._told is None:
            self._told = now
        if now - self._told >= EVERY:
            self._told = now
            for task in self.tasks:
                if not task.finished:
                    self.console.print(_line(task), markup=False, soft_wrap=True)


def _line(task: Task) -> str:
    of = "" if task.total is None else f" · {task.completed:.0f} of {task.total:.0f}"
    left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} to go"
    note = f" · {task.fields['note']}" if task.fields.get("note") else ""
    return f"{task.description}{of} after {timedelta(seconds=int(task.elapsed or 0))}{left}{note}"


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
        score = headline(record)
        self.bar.update(self.task, completed=record["round"], description=self.label,
                        note=note + (f" · {measure_of(record)} {score:.3f}" if score is not None else ""))

    def noted(self, message: str) -> None:
        self.bar.console.print(f"[dim]{escape(message)}[/dim]", soft_wrap=True)

    def warned(self, message: str) -> None:
        self.bar.console.print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)
