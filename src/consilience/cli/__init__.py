"""The command line. Errors a user can mend are printed without a traceback; the exit code says what kind they are."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
import typer.core
import typer.main
from rich.markup import escape

from .. import __version__
from ..blame import VARIABLE, blame
from ..errors import ConsilienceError
from ..memory import no_room
from ..runs.files import DiskError
from . import data, demo, federation, measure, methods, recipes, report, resume, sweep, train, use
from .output import err


class _Argument(typer.core.TyperArgument):
    """Typer 0.20, the newest that Flower allows, sets an argument's help before Click 8.5 sets it to nothing. Given back to `help`,
    Click would print it too, in a section of its own.
    """

    def __init__(self, *, help: str | None = None, **rest: Any) -> None:
        super().__init__(help=help, **rest)
        self.told = help or ""

    def get_help_record(self, ctx: Any) -> Any:
        record = super().get_help_record(ctx)
        if record is None or self.help:
            return record
        return record[0], "  ".join(filter(None, (self.told, record[1])))


typer.main.TyperArgument = _Argument         # type: ignore[misc]
typer.core.HAS_RICH = False        # else Typer escapes brackets for Rich in plain help too
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
                  help="Federated learning for data that differs from client to client.")
app.command()(train.run)
app.command()(train.compare)
app.command()(resume.resume)
app.command()(use.export)
app.command()(use.predict)
app.command()(use.onboard)
app.command()(measure.measure)
app.command()(report.report)
app.command()(sweep.sweep)
app.command()(recipes.recipes)
app.command()(recipes.reproduce)
app.command()(methods.methods)
app.command()(methods.explain)
app.command()(demo.demo)
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")
app.add_typer(methods.new_app, name="new")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"consilience {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    """Federated learning for data that differs from client to client."""


STOPPED = (130, 143)               # what Ctrl-C and SIGTERM exit with


@contextmanager
def _heeding_sigterm() -> Iterator[None]:
    """Leave by SIGTERM, which schedulers and `kill` send, as by Ctrl-C: processes are stopped, a terminal is put right, a word is said.

    Where somebody has it ignored, or handles it already, it stays so.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _show_what_can_be_shown() -> None:
    """A locale without some letter, as of ± or μ, must not end a command that has printed half of its table: its number stands for it."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    _show_what_can_be_shown()
    try:
        with _heeding_sigterm():
            app(standalone_mode=True)
    except ConsilienceError as error:
        err().print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else 130         # typer turns Ctrl-C into an exit with 130
        if code not in STOPPED:
            raise
        err().print("Stopped. Run the same command again to resume.")
        sys.exit(code)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        told, code = blame(error), 2
        if told is None and isinstance(error, OSError) and error.filename is not None and not os.environ.get(VARIABLE):
            # what the system says of a path: not permitted, a folder in place of a file, too long a name
            told, code = (f"{error.strerror or error}: {str(error.filename)!r}. Fix that, or name another place. "
                          f"{VARIABLE}=1 shows what it was needed for."), DiskError.exit_code
        if told is None and not os.environ.get(VARIABLE):
            told = no_room(error)
        if told is None:
            raise
        err().print(f"[red]Error:[/red] {escape(told)}", soft_wrap=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
