"""`consilience sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..runs.progress import RunsProgress, progress_bar
from ..runs.sweep import OBJECTIVES, SAMPLERS
from ..runs.sweep import sweep as run_sweep
from . import settings as s
from .output import AsJson, Format, print_json, print_table


def sweep(method: s.MethodOrFile = None,
          over: Annotated[list[str] | None, typer.Option("--over", help="A setting and its values, as in prox.mu=0.001,0.01,0.1, "
                          "lr=0.01:0.1:log or epochs=1:5. May be repeated; without it the ranges that the method declares.")] = None,
          trials: Annotated[int, typer.Option("--trials", help="Trials in all. A larger number continues an earlier sweep.", min=1)] = 20,
          sampler: Annotated[str, typer.Option("--sampler", help=f"How trials are drawn: {', '.join(SAMPLERS)}.")] = "tpe",
          prune: Annotated[bool, typer.Option("--prune", help="Stop trials that stay below the median of earlier ones.")] = False,
          score: Annotated[str, typer.Option("--score", help=f"Validation score to maximise: {', '.join(OBJECTIVES)}.")] = "last",
          config: s.Config = None, data: s.Data = None, split: s.Split = None, shift: s.Shift = None, clients: s.Clients = None,
          rounds: s.Rounds = None, set_: s.Set = None, seed: s.Seed = None, model: s.Model = None, taps: s.Taps = None,
          lr: s.Lr = None, batch: s.Batch = None, epochs: s.Epochs = None, steps: s.Steps = None,
          participation: s.Participation = None, eval_every: s.EvalEvery = None, engine: s.Engine = None, device: s.Device = None,
          devices: s.Devices = None, ray: s.Ray = None, data_dir: s.DataDir = None, option: s.Option = None,
          out_: Annotated[Path | None, typer.Option("--out", help="Folder of the sweep; without it runs/ and a name made from the "
                                                    "settings.")] = None,
          form: Format = "text", as_json: AsJson = False) -> None:
    """Search a method's settings with Optuna, by validation score. The same command resumes an interrupted sweep."""
    base = s.configure(config, set_, option, method=method, data=data, split=split, shift=shift, clients=clients, rounds=rounds,
                       seed=seed, model=model, taps=taps, lr=lr, batch=batch, epochs=epochs, steps=steps, participation=participation,
                       eval_every=eval_every, engine=engine, device=device, devices=devices, ray=ray, data_dir=data_dir)
    with progress_bar() as bar:
        found = run_sweep(base.run.method, base, over or [], trials, out=out_, sampler=sampler, prune=prune, score=score,
                          watcher=RunsProgress(bar))
    if as_json:
        print_json(found.document())
    else:
        print_table(found.table(), form)
        if form == "text":
            typer.echo(f"Trials: {found.folder}")
    if all(trial["failure"] for trial in found.trials):
        raise typer.Exit(3)
