"""How a run goes on, shown on standard error: a bar, or lines in a log; the latest scores, warnings."""

from __future__ import annotations

from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from ..core.federation import Federation
from ..metrics.criterion import measure_of, served_score
from .listener import Listener, Watcher

EVERY = 30.0                   # seconds between two lines of a log
LATELY = 600.0                 # seconds that the speed is taken over: a round may take minutes
NARROW = 120                   # columns of a terminal that has no room for a long bar


def progress_bar(*, of_bytes: bool = False, transient: bool = False) -> Progress:
    """A bar, or lines in a log, over whatever its tasks count, or `of_bytes`. A `transient` one leaves nothing behind.

    Where there is little room the bar and the note are shortened, never the counts and times.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    drawn = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
    kind, whole = Progress if drawn else _Lines, lambda: Column(no_wrap=True)
    count = DownloadColumn(table_column=whole()) if of_bytes else MofNCompleteColumn(table_column=whole())
    return kind(TextColumn("{task.description}", markup=False), BarColumn(40 if console.width >= NARROW else 10), count,
                TimeElapsedColumn(whole()), TimeRemainingColumn(table_column=whole()), _Note(), console=console, transient=transient,
                speed_estimate_period=LATELY)


class _Note(TextColumn):
    """What is said beside the bar: one line, cut where the terminal ends."""

    def __init__(self) -> None:
        super().__init__("{task.fields[note]}", markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class _Lines(Progress):
    """Where a bar cannot be drawn over itself, as in the log of a batch job: a line now and then, and the bar at the end.

    A clock of its own tells when: work that reports nothing for a while is what a reader of the log wonders about.
    """

    def start(self) -> None:
        super().start()
        self._over = Event()
        self._clock = Thread(target=self._tell, args=(self._over,), daemon=True)
        self._clock.start()

    def stop(self) -> None:
        self._over.set()
        self._clock.join()              # no line may come after the bar at the end
        super().stop()

    def _tell(self, over: Event) -> None:
        of_bytes = any(isinstance(column, DownloadColumn) for column in self.columns)
        while not over.wait(EVERY):
            for task in self.tasks:
                if not task.finished:
                    self.console.print(_line(task, of_bytes), markup=False, soft_wrap=True)


def _line(task: Task, of_bytes: bool) -> str:
    counts = [filesize.decimal(int(n)) if of_bytes else f"{n:.0f}" for n in (task.completed, task.total) if n is not None]
    of = f" · {' of '.join(counts)}" if task.completed or task.total is not None else ""
    left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} to go"
    note = f" · {task.fields['note']}" if task.fields.get("note") else ""
    return f"{task.description}{of} after {timedelta(seconds=int(task.elapsed or 0))}{left}{note}"


def latest(record: dict[str, Any]) -> str:
    """A round's loss and score, as far as there are any: sites with a part that guards what leaves them tell no loss."""
    said = {"loss": record["loss"], measure_of(record): served_score(record)}
    return " · ".join(f"{name} {value:.3f}" for name, value in said.items() if value is not None)


class RunProgress(Listener):
    """A bar over rounds with the latest scores, and the clients of the round under way."""

    def __init__(self, bar: Progress, label: str) -> None:
        self.bar, self.label = bar, label

    def started(self, federation: Federation, rounds: int, done: int) -> None:
        self.task = self.bar.add_task(self.label, total=rounds, completed=done, note="")

    def client_done(self, done: int, of: int) -> None:
        self.bar.update(self.task, description=f"{self.label} · client {done}/{of}")

    def scoring(self) -> None:
        self.bar.update(self.task, description=f"{self.label} · scoring")

    def round_done(self, record: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=record["round"], description=self.label, note=latest(record))

    def noted(self, message: str) -> None:
        self.bar.console.print(f"[dim]{escape(message)}[/dim]", soft_wrap=True)

    def warned(self, message: str) -> None:
        self.bar.console.print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)


class RunsProgress(Watcher):
    """A bar over the rounds of all runs, with the number of runs and the latest to end."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.runs, self.ended, self.task = bar, 0, 0, TaskID(0)

    def begin(self, what: str, runs: int, rounds: int) -> None:
        self.task = self.bar.add_task(what, total=rounds, note=f"0 of {runs} runs")
        self.runs, self.ended = runs, 0

    def rounds_done(self, rounds: int) -> None:
        self.bar.update(self.task, completed=rounds)

    def rounds_found(self, rounds: int) -> None:
        """They took no time now, so they say nothing of the time left: no step of the bar."""
        for task in self.bar.tasks:
            if task.id == self.task:
                task.completed = rounds

    def run_done(self, label: str, failure: str | None) -> None:
        self.ended += 1
        self.bar.update(self.task, note=f"{self.ended} of {self.runs} runs · {label}{' failed' if failure else ''}")

    def noted(self, label: str, note: str) -> None:
        self.bar.update(self.task, note=f"{self.ended} of {self.runs} runs · {label}: {note}")

    def warned(self, message: str) -> None:
        self.bar.console.print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)
