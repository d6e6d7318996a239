"""`consilience federation demo` and `consilience federation study`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from ..errors import ConfigError
from ..runs.progress import latest, progress_bar
from .output import AsJson, Format, out, print_json, print_table, printed_first


@contextlib.contextmanager
def _workspace(chosen: Path | None) -> Iterator[Path]:
    """The folder asked for, or one that is removed afterwards."""
    if chosen is not None:
        yield chosen
        return
    folder = Path(tempfile.mkdtemp(prefix="consilience-federation-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def demo(method: Annotated[str, typer.Option("--method", help="Names joined by '+', as in scaffold+dbe.")] = "scaffold+dbe",
         rounds: Annotated[int, typer.Option("--rounds", help="Rounds of training.", min=1)] = 6,
         out_: Annotated[Path | None, typer.Option("--out", help="Keep certificates, stores, logs and the run in this new folder.")] = None,
         insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys.")] = False,
         form: Format = "text", as_json: AsJson = False) -> None:
    """Train over a server and three sites on this machine. With TLS and keys, on skewed parts of the digits; compared with simulation."""
    from ..federation.demo import demo as run
    if out_ is not None and out_.exists():
        raise ConfigError(f"{str(out_)!r} exists. Name a new folder.")
    start = time.monotonic()
    with _workspace(out_) as folder, progress_bar() as bar:
        task = bar.add_task("preparing", total=rounds, note="")

        def hear(record: dict[str, Any]) -> None:
            bar.update(task, completed=record["round"], note=latest(record))
        result = run(method, folder, values={"rounds": rounds}, insecure=insecure, hear=hear,
                     say=lambda text: bar.update(task, description=text),
                     warn=lambda text: bar.console.print(f"[yellow]Warning:[/yellow] {escape(text)}", soft_wrap=True))
        bar.update(task, description="done")
    if as_json:
        return print_json(result.document())
    print_table(result.table(), form)
    if form == "text":
        kept = f" Everything is kept in {out_}." if out_ else ""
        out().print(f"\n{time.monotonic() - start:.0f} seconds; all processes have ended.{kept} Next: consilience federation study --demo, "
                    "or docs/federation.md for three machines.", soft_wrap=True, markup=False)


def study(app: Annotated[Path | None, typer.Argument(help="The app's folder, made by `federation init` without a method's "
                                                     "options.")] = None,
          server: Annotated[Path | None, typer.Option("--server", help="The folder of the server that runs on this machine.")] = None,
          federation: Annotated[str | None, typer.Option("--federation", help="Instead of --server: a connection in your own Flower "
                                                         "configuration, to a server on this machine.")] = None,
          on_this_machine: Annotated[bool, typer.Option("--demo", help="Start three sites with parts of the digits on this "
                                                        "machine.")] = False,
          candidate: Annotated[list[str] | None, typer.Option("--candidate", help="A method to try beside local and fedavg. "
                                                              "May be repeated.")] = None,
          tune: Annotated[int, typer.Option("--tune", help="Configurations that every method chooses from, by validation.", min=1)] = 3,
          lrs: Annotated[str, typer.Option("--lrs", help="Learning rates in the search.")] = "0.01,0.03,0.1",
          rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds of every run; without it, the app's.", min=1)] = None,
          out_: Annotated[Path, typer.Option("--out", help="Folder of the runs, study.json and study.md. The same command resumes "
                                             "an interrupted study.")] = Path("study"),
          form: Format = "text", as_json: AsJson = False) -> None:
    """Find the method for the sites' data. Runs local, FedAvg and candidates over them, and says what each site would gain or lose."""
    from ..federation.app import read_settings
    from ..federation.approval import STUDY
    from ..federation.demo import digits_federation
    from ..federation.launch import connect, elsewhere
    from ..federation.study import CANDIDATES, make_plan, run_study
    from ..federation.study_report import Report
    rates = _rates(lrs)
    if on_this_machine:
        if app or server or federation:
            raise ConfigError("--demo starts a federation of its own; leave APP, --server and --federation out.")
    elif app is None or (server is None) == (federation is None):
        raise ConfigError("A study needs an app's folder and a running federation: consilience federation study APP --server FOLDER (or "
                          "--federation NAME). --demo starts one on this machine.")
    with contextlib.ExitStack() as stack, progress_bar() as bar:
        ear = StudyProgress(bar)
        settings = None if on_this_machine else read_settings(app or Path())
        if settings is None:
            found = stack.enter_context(digits_federation(out_ / "federation", {"method": "fedavg"}, may_change=STUDY,
                                                          say=ear.say))
            launcher, link, settings, app = found.launcher, found.link, found.settings, found.app
        plan = make_plan(settings, candidate or CANDIDATES, budget=tune, rounds=rounds, learning_rates=rates)
        if not on_this_machine:
            launcher, link = connect(server) if server else elsewhere(str(federation), out_)
            stack.enter_context(launcher)
        assert app is not None
        outcomes = run_study(plan, app, out_ / "runs", launcher, link, ear.hearing())
    report = Report(plan, outcomes)
    with printed_first() as write:
        saved = write(lambda: report.save(out_))
        if as_json:
            print_json(report.document())
        else:
            for i, table in enumerate(report.tables()):
                if i:
                    sys.stdout.write("\n")
                print_table(table, form)
            if form == "text" and saved:
                out().print(f"\nRuns, study.json and study.md: {out_}", markup=False)
        if any(outcome.failure for outcome in outcomes):        # the tables say which, and why
            raise typer.Exit(3)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(r) for r in text.split(",") if r.strip())
    except ValueError:
        rates = ()
    if not rates or any(not 0 < r < float("inf") for r in rates):
        raise ConfigError(f"--lrs takes learning rates above 0, as in 0.01,0.1. Got {text!r} instead.")
    return rates


class StudyProgress:
    """A bar over the rounds of all runs, with the run under way and the latest to end."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.task, self.done, self.runs, self.rounds = bar, TaskID(-1), 0, 0, 0

    def say(self, text: str) -> None:
        if self.task == TaskID(-1):
            self.task = self.bar.add_task(text, total=None, note="")
        self.bar.update(self.task, description=text)

    def hearing(self) -> Any:
        from ..federation.study import Listener, Outcome, Trial
        outer = self

        class Ear(Listener):
            def started(self, runs: int, rounds: int, done: int) -> None:
                outer.say("study")
                outer.runs, outer.rounds = runs, rounds
                outer.bar.update(outer.task, total=runs * rounds, note=f"{done} of {runs} runs were done before" if done else "")

            def run_started(self, trial: Trial) -> None:
                words = ", ".join(f"{k}={v}" for k, v in trial.point.items())
                outer.bar.update(outer.task, description=f"{trial.method} ({words})" if words else trial.method)

            def round_done(self, record: dict[str, Any]) -> None:
                outer.bar.update(outer.task, completed=outer.done * outer.rounds + record["round"])

            def run_done(self, outcome: Outcome) -> None:
                outer.done += 1
                said = "failed" if outcome.failure else "–" if outcome.validation is None else f"validation {outcome.validation:.3f}"
                outer.bar.update(outer.task, completed=outer.done * outer.rounds,
                                 note=f"{outer.done} of {outer.runs} runs · {outcome.trial.method} {said}")

            def warned(self, message: str) -> None:
                outer.bar.console.print(f"[yellow]Warning:[/yellow] {escape(message)}", soft_wrap=True)
        return Ear()
