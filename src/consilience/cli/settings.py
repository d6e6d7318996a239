"""Command-line options shared by the commands that train, and how they meet a configuration file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..runs.config import RunConfig, flatten_settings, parse_set, read_config_file

_USUAL = RunConfig().flat()        # the defaults, which a file may replace

Method = Annotated[str, typer.Argument(help="Names joined by '+', as in scaffold+dbe; `consilience methods` lists them.",
                                       show_default=False)]
MethodOrFile = Annotated[str | None, typer.Argument(help="Names joined by '+', as in scaffold+dbe; `consilience methods` lists them. "
                                                         "May stand in the file of --config instead.", show_default=False)]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML, YAML or JSON file with the same settings.")]
Data = Annotated[str | None, typer.Option("--data", help="Data set (digits unless a file says otherwise).")]
Split = Annotated[str | None, typer.Option("--split", help="How the data are divided among clients, as in 'dirichlet(alpha=0.1)'; "
                                                            "without it the data set's own split.")]
Shift = Annotated[str | None, typer.Option("--shift", help="Feature shift, as in 'rotation(step=15)'; none by default.")]
Clients = Annotated[int | None, typer.Option("--clients", help="Number of clients; without it the data set's own number, mostly 10.")]
Rounds = Annotated[int | None, typer.Option("--rounds", help=f"Rounds of training; {_USUAL['rounds']} by default.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="An option of the method, as in dbe.kappa=5. May be repeated.")]
Seed = Annotated[int | None, typer.Option("--seed", help=f"Seed of every random draw; {_USUAL['seed']} by default.")]
Model = Annotated[str | None, typer.Option("--model", help="Model, as in \"resnet18(stem='3x3')\" or package.module:factory; "
                                                            "without it one that suits the data.")]
Taps = Annotated[str | None, typer.Option("--taps", help="Points of your own model, as in head=fc,stages=layer1+layer2.")]
Lr = Annotated[float | None, typer.Option("--lr", help=f"Local learning rate; {_USUAL['lr']} by default.")]
Batch = Annotated[int | None, typer.Option("--batch", help=f"Samples in a batch; {_USUAL['batch']} by default.")]
Epochs = Annotated[int | None, typer.Option("--epochs", help=f"Local epochs in a round; {_USUAL['epochs']} by default.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Local steps in a round, instead of epochs.")]
Participation = Annotated[float | None, typer.Option("--participation", help="Clients in a round: a fraction (1, the default, means all), "
                                                                            "or a number from 2 up.")]
EvalEvery = Annotated[int | None, typer.Option("--eval-every", help="Score the models every so many rounds, and after the last; "
                                                                     "1 by default.")]
Engine = Annotated[str | None, typer.Option("--engine", help="Where steps run: sequential, workers (processes), slots (on a GPU) or ray; "
                                                              "auto, the default, chooses.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 …; without it a GPU where there is one.")]
Devices = Annotated[str | None, typer.Option("--devices", help="Several GPUs that share a round's clients, as in 0-7 or 0,2 or all.")]
Ray = Annotated[str | None, typer.Option("--ray", help="Address of the Ray cluster for --engine ray or --on ray; without it RAY_ADDRESS, "
                                                       "or a Ray of this machine's own.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the data sets; without it CONSILIENCE_DATA, else a folder of "
                                                            "the user's own.")]
Option = Annotated[list[str] | None, typer.Option("--option", "-o", help="Any other setting of the run, as in momentum=0.9 or "
                                                                        "weights=uniform; docs/runs.md lists them. May be repeated.")]


def configure(config: Path | None, set_: list[str] | None, option: list[str] | None, **given: Any) -> RunConfig:
    """A file's settings under those of the command line."""
    values: dict[str, Any] = read_config_file(config) if config else {}
    of_file = dict(values)
    settings = {**flatten_settings(values.pop("settings", None) or {}), **parse_set(set_ or [], of_run=True)}
    typed = {k: (str(v) if isinstance(v, Path) else v) for k, v in given.items() if v is not None}
    for pair in option or []:
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"takes name=value, as in momentum=0.9. Got {pair!r} instead.", param_hint="--option")
        if key.strip() == "settings":
            raise ConfigError("The method's 'settings' are given one by one, as in --set dbe.kappa=5.")
        if key.strip() == "method":
            raise ConfigError(f"A method is named right after the command, as in run {text.strip() or 'fedavg'}, and not by -o method=….")
        if key.strip() in typed:
            raise set_twice(key.strip(), typed[key.strip()], pair)
        values[key.strip()] = text
    if not {"method"} & {*values, *typed}:
        raise ConfigError("Which method? Name it right after the command, as in fedavg, or in the file of --config, as in "
                          "method = \"fedavg\".")
    with file_named(config, {"method": typed.get("method"), **of_file}):
        return RunConfig.make({**values, **typed, "settings": settings})


@contextlib.contextmanager
def file_named(config: Path | None, of_file: Mapping[str, Any]) -> Iterator[None]:
    """Say in which file a wrong setting stands: where the file alone is refused for the same reason."""
    try:
        yield
    except ConfigError as error:
        if config is None or _refusal(of_file) != str(error):
            raise
        raise ConfigError(f"{config}: {error}") from None


def _refusal(values: Mapping[str, Any]) -> str:
    try:
        RunConfig.make(values)
    except ConfigError as error:
        return str(error)
    return ""


def set_twice(name: str, value: Any, pair: str) -> ConfigError:
    """Neither of two settings of one name is dropped without a word."""
    return ConfigError(f"{name!r} is set twice: by --{name.replace('_', '-')} {value} and by -o {pair}. Leave one of them out.")
