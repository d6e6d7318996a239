"""`consilience run` and `consilience compare`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..metrics.criterion import model_score
from ..report.tables import Table
from ..runs.compare import SCORES, Comparison, compare_config
from ..runs.config import RunConfig, flatten_settings, parse_set, read_config_file
from ..runs.folder import default_folder
from ..runs.privacy import privacy_line
from ..runs.progress import RunProgress, RunsProgress, progress_bar
from ..runs.result import Result
from ..runs.run import run_config
from . import settings as s
from .output import AsJson, Format, out, print_json, print_table, printed_first, warn

Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; without it runs/ and a name made from the settings.")]
Again = Annotated[bool, typer.Option("--again", help="Run again even if the folder holds a finished run.")]


def run(method: s.MethodOrFile = None, config: s.Config = None, data: s.Data = None, split: s.Split = None, shift: s.Shift = None,
        clients: s.Clients = None, rounds: s.Rounds = None, set_: s.Set = None, seed: s.Seed = None, model: s.Model = None,
        taps: s.Taps = None, lr: s.Lr = None, batch: s.Batch = None, epochs: s.Epochs = None, steps: s.Steps = None,
        participation: s.Participation = None, eval_every: s.EvalEvery = None, engine: s.Engine = None, device: s.Device = None,
        devices: s.Devices = None, ray: s.Ray = None, data_dir: s.DataDir = None, option: s.Option = None, out_: Out = None,
        again: Again = False, as_json: AsJson = False) -> None:
    """Train one method and keep its records and models. The same command resumes an interrupted run."""
    settled = s.configure(config, set_, option, method=method, data=data, split=split, shift=shift, clients=clients, rounds=rounds,
                          seed=seed, model=model, taps=taps, lr=lr, batch=batch, epochs=epochs, steps=steps,
                          participation=participation, eval_every=eval_every, engine=engine, device=device, devices=devices, ray=ray,
                          data_dir=data_dir)
    folder = out_ or default_folder(settled)
    with progress_bar() as bar:
        result = run_config(settled, out=folder, listener=RunProgress(bar, settled.stack().canonical), again=again)
    if as_json:
        print_json(result.document())
    else:
        _show(result, folder)


def _show(result: Result, folder: Path) -> None:
    summary = result.summary()
    say = partial(out().print, markup=False)                    # a folder may be called [x]
    if "last" not in summary:
        say("No round was scored.")
    else:
        rows = []
        for label, key in (("last round", "last"), ("best by validation", "best_by_validation"), ("best by test", "best_by_test")):
            if key in summary:
                entry = summary[key]
                cells = [label, str(entry["round"])]
                for model, measure in (("global", "value"), ("personalised", "value"), ("personalised", "worst")):
                    value = model_score(entry, model).get(measure)
                    cells.append("–" if value is None else f"{value:.3f}")
                rows.append(cells)
        title = f"{result.method} on {result.data['name']} ({result.data['split']}, {result.data['clients']} clients)"
        print_table(Table(["", "round", "global", "personalised", "worst client"], rows, title), "text")
        last = result.scored[-1]
        if by := last.get("criterion"):
            say(f"Judged by {by['measure']}; {(by['personalised'] or by['global'] or {}).get('scored', 'it was not scored')}.")
        say(f"Global model scored {last['global']['scored']}." if last["global"] else
            f"No global score: {last['no_global_model']}.")
        say(f"Personalised models scored {last['personalised']['scored']}.")
        if held := last.get("held_out"):
            _show_held_out(say, "accuracy " if by else "", held["accuracy"], held["per_client"])
            if by and (judged := by.get("held_out")):
                _show_held_out(say, f"{by['measure']} ", judged["value"], judged["per_client"])
        say(f"Sent up {_size(summary['bytes_up'])}, down {_size(summary['bytes_down'])}.")
    if "privacy" in summary:
        say(f"Privacy: {privacy_line(summary['privacy'])}.")
    say(f"Records and models: {folder}")


def _show_held_out(say: Callable[[str], None], measure: str, value: float | None, per_client: dict[str, float]) -> None:
    each = [f"{name} {score:.3f}" for name, score in per_client.items()]
    shown = ", ".join(each[:8]) + (", …" if len(each) > 8 else "")
    of = "–" if value is None else f"{value:.3f}"
    say(f"Clients held out, last round: {measure}{of} with the global model{f' ({shown})' if shown else ''}.")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def compare(methods: Annotated[list[str], typer.Argument(help="Methods to compare, as in fedavg scaffold fedavg+dbe.",
                                                         show_default=False)],
            seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds; they count up from --seed.", min=1)] = 3,
            tune: Annotated[int | None, typer.Option("--tune", help="First let every method choose among so many configurations, by "
                                                     "validation, on a seed that is not compared.", min=1)] = None,
            reference: Annotated[str | None, typer.Option("--reference", help="The method that gains are measured against; fedavg "
                                                          "where it is among the rows, else the first method.")] = None,
            score: Annotated[str, typer.Option("--score", help=f"Which rounds are reported: {', '.join(SCORES)}.")] = "last",
            config: s.Config = None, data: s.Data = None, split: s.Split = None, shift: s.Shift = None, clients: s.Clients = None,
            rounds: s.Rounds = None, set_: s.Set = None, seed: s.Seed = None, model: s.Model = None, taps: s.Taps = None,
            lr: s.Lr = None, batch: s.Batch = None, epochs: s.Epochs = None, steps: s.Steps = None,
            participation: s.Participation = None, eval_every: s.EvalEvery = None, engine: s.Engine = None, device: s.Device = None,
            devices: s.Devices = None, ray: s.Ray = None, data_dir: s.DataDir = None, option: s.Option = None,
            out_: Annotated[Path | None, typer.Option("--out", help="Folder of the runs, comparison.json and comparison.md; without it "
                                                      "only the runs are kept, in runs/.")] = None,
            jobs: Annotated[int | None, typer.Option("--jobs", help="Runs at a time; by default as many as cores, or one on a GPU.",
                                                     min=1)] = None,
            on: Annotated[str, typer.Option("--on", help="Where the runs are made: here, in processes of this machine, or ray, on a "
                                            "cluster.")] = "here",
            per_client: Annotated[bool, typer.Option("--per-client", help="Also print a table with a row for every client and a column for "
                                                     "every method.")] = False,
            no_local: Annotated[bool, typer.Option("--no-local", help="Leave out the row of clients training alone.")] = False,
            again: Again = False, form: Format = "text", as_json: AsJson = False) -> None:
    """Train several methods with several seeds and print one table. The same command resumes an interrupted comparison."""
    file = read_config_file(config) if config else {}
    settings = {**flatten_settings(file.pop("settings", None) or {}), **parse_set(set_ or [])}       # every method takes its own
    typed = {pair.partition("=")[0].strip() for pair in option or []}
    flags: dict[str, Any] = {"data": data, "split": split, "shift": shift, "clients": clients, "rounds": rounds, "seed": seed,
                             "model": model, "taps": taps, "lr": lr, "batch": batch, "epochs": epochs, "steps": steps,
                             "participation": participation, "eval_every": eval_every, "engine": engine, "device": device,
                             "devices": devices, "ray": ray, "data_dir": data_dir}
    given = {k: v for k, v in flags.items() if v is not None}
    with s.file_named(config, {**file, "method": "fedavg"}):
        base = s.configure(None, None, option, **{k: v for k, v in file.items() if k not in typed} | given | {"method": "fedavg"})
    base = dataclasses.replace(base, settings=settings)
    fixed = (base.policy.lr,) if "lr" in {*file, *typed, *given} else None
    comparison = show_comparison(methods, base, list(range(base.policy.seed, base.policy.seed + seeds)), out_=out_ or Path("runs"),
                                 jobs=jobs, with_local=not no_local, again=again, reference=reference, score=score, tune=tune,
                                 learning_rates=fixed, on=on)
    with printed_first() as write:
        if out_ is not None:
            write(lambda: comparison.save(out_, per_client))
        by_client = comparison.client_table() if per_client else None
        if by_client and not by_client.rows:
            warn(by_client.notes[0])
        if as_json:
            print_json(comparison.document(per_client))
        elif form == "json" and by_client:                      # two lists in a row would be no JSON
            print_json({"rows": comparison.table().data, "clients": by_client.data})
        elif form == "csv" and by_client and by_client.rows:    # nor would two tables be CSV
            print_table(comparison.long_table(), form)
        else:
            print_table(comparison.table(), form)
            if by_client and by_client.rows:
                sys.stdout.write("\n")
                print_table(by_client, form)
            if comparison.tuning and form in ("text", "markdown"):
                sys.stdout.write("\n")
                print_table(comparison.tuning.table(), form)
        for line in comparison.failed():
            warn(line)
        if comparison.failures:
            raise typer.Exit(3)


def show_comparison(methods: list[str], base: RunConfig, seeds: list[int], *, out_: Path | None, jobs: int | None,
                    with_local: bool = True, again: bool = False, overrides: dict[str, Any] | None = None,
                    **more: Any) -> Comparison:
    """Run a comparison under one progress display."""
    with progress_bar() as bar:
        return compare_config(methods, base, seeds, out=out_, jobs=jobs, with_local=with_local, again=again, overrides=overrides,
                              watcher=RunsProgress(bar), **more)
