"""`consilience run` and `consilience compare`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..report.tables import Table
from ..runs.compare import Comparison
from ..runs.compare import compare as compare_runs
from ..runs.config import RunConfig, parse_set
from ..runs.folder import default_folder
from ..runs.result import Result
from ..runs.run import run_config
from . import settings as s
from .output import AsJson, Format, RunProgress, out, print_json, print_table, progress_bar, warn

Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; without it runs/ and a name made from the settings.")]
Again = Annotated[bool, typer.Option("--again", help="Run anew even if the folder holds a finished run.")]


def run(method: s.Method, config: s.Config = None, data: s.Data = None, split: s.Split = None, shift: s.Shift = None,
        clients: s.Clients = None, rounds: s.Rounds = None, set_: s.Set = None, seed: s.Seed = None, model: s.Model = None,
        taps: s.Taps = None, lr: s.Lr = None, batch: s.Batch = None, epochs: s.Epochs = None, steps: s.Steps = None,
        participation: s.Participation = None, eval_every: s.EvalEvery = None, engine: s.Engine = None, device: s.Device = None,
        data_dir: s.DataDir = None, option: s.Option = None, out_: Out = None, again: Again = False, as_json: AsJson = False) -> None:
    """Train one method and keep its records and models. The same command goes on where an interrupted one stopped."""
    settled = s.configure(config, set_, option, method=method, data=data, split=split, shift=shift, clients=clients, rounds=rounds,
                          seed=seed, model=model, taps=taps, lr=lr, batch=batch, epochs=epochs, steps=steps,
                          participation=participation, eval_every=eval_every, engine=engine, device=device, data_dir=data_dir)
    folder = out_ or default_folder(settled)
    with progress_bar() as bar:
        result = run_config(settled, out=folder, listener=RunProgress(bar, settled.stack().canonical), again=again)
    if as_json:
        print_json(result.document())
    else:
        _show(result, folder)


def _show(result: Result, folder: Path) -> None:
    summary = result.summary()
    console = out()
    if "last" not in summary:
        console.print("No round was scored.")
    else:
        rows = []
        for label, key in (("last round", "last"), ("best by validation", "best_by_validation"), ("best by test", "best_by_test")):
            if key in summary:
                entry = summary[key]
                cells = [label, str(entry["round"])]
                for model, measure in (("global", "accuracy"), ("personalised", "accuracy"), ("personalised", "worst")):
                    value = (entry[model] or {}).get(measure)
                    cells.append("–" if value is None else f"{value:.3f}")
                rows.append(cells)
        title = f"{result.method} on {result.data['name']} ({result.data['split']}, {result.data['clients']} clients)"
        print_table(Table(["", "round", "global", "personalised", "worst client"], rows, title), "text")
        last = result.scored[-1]
        console.print(f"Global model scored {last['global']['scored']}." if last["global"] else
                      f"No global score: {last['no_global_model']}.")
        console.print(f"Personalised models scored {last['personalised']['scored']}.")
        console.print(f"Sent up {_size(summary['bytes_up'])}, down {_size(summary['bytes_down'])}.")
    console.print(f"Records and models: {folder}")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def compare(methods: Annotated[list[str], typer.Argument(help="Methods to compare, as in fedavg scaffold fedavg+dbe.",
                                                         show_default=False)],
            seeds: Annotated[int, typer.Option("--seeds", help="Number of seeds; they count up from --seed.", min=1)] = 3,
            config: s.Config = None, data: s.Data = None, split: s.Split = None, shift: s.Shift = None, clients: s.Clients = None,
            rounds: s.Rounds = None, set_: s.Set = None, seed: s.Seed = None, model: s.Model = None, taps: s.Taps = None,
            lr: s.Lr = None, batch: s.Batch = None, epochs: s.Epochs = None, steps: s.Steps = None,
            participation: s.Participation = None, eval_every: s.EvalEvery = None, engine: s.Engine = None, device: s.Device = None,
            data_dir: s.DataDir = None, option: s.Option = None, out_: Annotated[Path, typer.Option("--out", help="Folder of the runs.")] =
            Path("runs"), jobs: Annotated[int | None, typer.Option("--jobs", help="Runs at a time; all cores by default.", min=1)] = None,
            no_local: Annotated[bool, typer.Option("--no-local", help="Leave out the row of clients training alone.")] = False,
            again: Again = False, form: Format = "text", as_json: AsJson = False) -> None:
    """Train several methods with several seeds and print one table. An interrupted comparison goes on where it was."""
    base = s.configure(config, None, option, method="fedavg", data=data, split=split, shift=shift, clients=clients, rounds=rounds,
                       seed=seed, model=model, taps=taps, lr=lr, batch=batch, epochs=epochs, steps=steps, participation=participation,
                       eval_every=eval_every, engine=engine, device=device, data_dir=data_dir)
    base = dataclasses.replace(base, settings={**base.settings, **parse_set(set_ or [])})     # every method takes its own
    first = base.policy.seed
    comparison = show_comparison(methods, base, list(range(first, first + seeds)), out_=out_, jobs=jobs, with_local=not no_local,
                                 again=again)
    if as_json:
        print_json(comparison.rows())
    else:
        print_table(comparison.table(), form)
    for (name, number), why in comparison.failures.items():
        warn(f"{name}, seed {number} failed: {why}")
    if comparison.failures:
        raise typer.Exit(3)


def show_comparison(methods: list[str], base: RunConfig, seeds: list[int], *, out_: Path | None, jobs: int | None,
                    with_local: bool = True, again: bool = False, overrides: dict[str, Any] | None = None) -> Comparison:
    """Run a comparison under one progress bar."""
    with progress_bar() as bar:
        total = (len(dict.fromkeys(methods)) + (1 if with_local and "local" not in methods else 0)) * len(seeds)
        task = bar.add_task("comparing", total=total, note="")

        def done(name: str, seed: int, outcome: Any) -> None:
            bar.update(task, advance=1, note=f"{name}, seed {seed}" + (" failed" if isinstance(outcome, str) else ""))
        return compare_runs(methods, base, seeds, out=out_, jobs=jobs, with_local=with_local, again=again, overrides=overrides,
                            on_done=done)
