"""Settings of a run: one flat set of names, the same in Python, in a file and on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core.policy import Policy
from ..data.shifts import split_plus
from ..engines.devices import parse_devices
from ..errors import ConfigError, did_you_mean
from ..metrics.criterion import ACCURACY
from ..metrics.registry import canonical
from ..options import build, check, hints_of, one_spelling, option
from ..parts.stack import Stack, parse_stack


@dataclass(frozen=True)
class _RunOnly:
    """What a run needs beside its policy."""

    method: str = option("fedavg", "names joined by '+', as in scaffold+dbe")
    data: str = option("digits", "the data set; `consilience data list` shows the names")
    split: str | None = option(None, "how it is divided among clients, as in dirichlet(alpha=0.1); none: the data set's own")
    clients: int | None = option(None, "number of clients; none: the data set's own", low=1)
    shift: str | None = option(None, "what makes clients differ in their inputs, as in rotation(step=15)")
    train: float | None = option(None, "fraction of a client's samples to train on", low=0.0, high=1.0)
    validation: float | None = option(None, "fraction of a client's samples for validation", low=0.0, high=1.0)
    test: str | None = option(None, "what is tested: clients, global, both or published")
    pool: str | None = option(None, "which samples are divided: train, or all")
    transform: str | None = option(None, "what is done to a batch, as in crop+flip+normalise")
    train_fraction: float | None = option(None, "keep only this fraction of every client's training samples", above=0.0, high=1.0)
    hold_out: tuple[str, ...] = option((), "clients, by name or number, that are scored but never trained on")
    split_file: str | None = option(None, "a saved split to use instead")
    data_seed: int | None = option(None, "seed of the split; none: the run's seed", low=0)
    data_dir: str | None = option(None, "where data sets lie; none: CONSILIENCE_DATA or a folder of the user's")
    map_data: bool = option(False, "keep the samples in a file under data_dir and map them, where they would fill the memory")
    proxy: str | None = option(None, "a public data set for parts that need one (fedbr with pseudo=mixture)")
    model: str | None = option(None, "the model, as in resnet18(stem='3x3') or package.module:factory; none: the data set's own")
    taps: str | None = option(None, "points of a model of your own, as in head=classifier,stages=layer1+layer2")
    pretrained: str | None = option(None, "initial weights from a safetensors file")
    rounds: int = option(30, "rounds of training", low=1)
    eval_every: int = option(1, "score every so many rounds, and after the last", low=1)
    eval_clients: int | None = option(None, "score so many clients, drawn by the seed; 0: all; none: all, or 1,000 where there are more",
                                      low=0)
    patience: int = option(0, "stop after so many scorings without a better validation score; 0: never", low=0)
    measure: tuple[str, ...] = option((), "measures taken at every scoring, as in auroc or drift; `consilience measure --list` shows them")
    measure_every: int | None = option(None, "take measures every so many rounds, where these are scored, and after the last; none: at "
                                             "every scoring", low=1)
    criterion: str = option("accuracy", "the measure that models are judged by, as in auroc or f1(positive=died): best rounds, early "
                                        "stopping, tuning and comparisons go by it")
    track: tuple[str, ...] = option((), "where records go beside the run's folder: tensorboard, mlflow, wandb")
    engine: str = option("auto", "where steps run: one after another, in processes, in slots of a GPU, or on a Ray cluster",
                         choices=("auto", "sequential", "workers", "slots", "ray"))
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto: cuda where there is one")
    devices: str | None = option(None, "several GPUs that share a round's clients, as in 0-7 or 0,2 or all; none: one device")
    ray: str | None = option(None, "address of a Ray cluster for engine=ray; none: RAY_ADDRESS, or a Ray of this machine's own")
    store: str = option("auto", "where clients' states lie between rounds; auto: in memory unless they would fill it",
                        choices=("auto", "memory", "disk"))
    checkpoint_seconds: float = option(0.0, "least seconds between two checkpoints; 0: as often as a tenth of the time allows", low=0.0)

    def __post_init__(self) -> None:
        check(self, "the run")
        object.__setattr__(self, "criterion", canonical(self.criterion))            # one measure however it is written
        object.__setattr__(self, "measure", tuple(dict.fromkeys(map(canonical, self.measure))))


_POLICY = {f.name for f in dataclasses.fields(Policy)}
_RUN = {f.name for f in dataclasses.fields(_RunOnly)}
# say how data are divided
DIVIDING = ("split", "clients", "shift", "train", "validation", "test", "pool", "transform", "train_fraction", "hold_out", "split_file",
            "data_seed")
SETTLED = ("weights", "layout")             # may be "auto" in a configuration; a run is kept with what came of it
CALLS = ("data", "split", "proxy", "model", "schedule")              # name(key=value, …), however it is spaced and quoted
CHAINS = ("shift", "transform")                                      # such calls joined by +
# differ between machines without changing a result
PLACES = ("data_dir", "map_data", "track", "store", "checkpoint_seconds", "devices", "ray")


@dataclass(frozen=True)
class RunConfig:
    """A validated configuration. `settings` are the method's options by path: {'dbe.kappa': 5}."""

    run: _RunOnly = field(default_factory=_RunOnly)
    policy: Policy = field(default_factory=Policy)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def names() -> list[str]:
        return sorted(_POLICY | _RUN | {"settings"})

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> RunConfig:
        """From loose values; unknown names are refused with the nearest ones."""
        for key in values:
            if key not in _POLICY and key not in _RUN and key != "settings":
                cure = (f" An option of a method is given as --set {key}=…, in a file and in Python under 'settings'." if "." in key else
                        " It is an option of the command `consilience compare`, --seeds, and stands in no file." if key == "seeds" else
                        did_you_mean(key, cls.names()))
                raise ConfigError(f"The run has no option {key!r}.{cure}")
            if isinstance(values[key], str) and not values[key].strip() and hints_of(_RunOnly).get(key) == str | None:
                raise ConfigError(f"The {key!r} option of the run is empty (a variable of the shell that is not set?). Leave it out to "
                                  "have the default.")
        config = cls(build(_RunOnly, {k: v for k, v in values.items() if k in _RUN}, "the run"),
                     build(Policy, {k: v for k, v in values.items() if k in _POLICY}, "the run"),
                     flatten_settings(values.get("settings") or {}))
        config.stack().method()              # a wrong method or setting, or a refused combination, is said now
        if config.run.taps is not None and ":" not in (config.run.model or "").partition("(")[0]:
            raise ConfigError("The 'taps' option of the run names the points of a model of your own, as in --model package.module:factory; "
                              "ours know theirs.")
        if config.run.devices is not None:
            _check_devices(config.run)
        return config

    def stack(self) -> Stack:
        return parse_stack(self.run.method, self.settings)

    def replace(self, **values: Any) -> RunConfig:
        return RunConfig.make({**self.flat(), **values})

    def data_settings(self) -> dict[str, Any]:
        """How the data are read and divided, by the names that `consilience.data.load` has for it."""
        told = {name: getattr(self.run, name) for name in (*DIVIDING, "data_dir", "map_data")}
        seed, held = told.pop("data_seed"), told.pop("hold_out")
        return told | {"seed": self.policy.seed if seed is None else seed, "hold_out": [int(c) if c.isdigit() else c for c in held]}

    def flat(self) -> dict[str, Any]:
        """All settings by their flat names, defaults included."""
        return {**dataclasses.asdict(self.run), **dataclasses.asdict(self.policy), "settings": dict(self.settings)}

    def portable(self) -> dict[str, Any]:
        """What decides the result: all settings, without this machine's places. The same for every way of typing a setting."""
        stack = self.stack()
        # left out where it is accuracy, so that runs from before there was a choice stay what they are
        usual = ("criterion",) if self.run.criterion == ACCURACY else ()
        return {k: spelled(k, v) for k, v in self.flat().items() if k not in PLACES + usual} | {
            "method": stack.canonical, "settings": _changed(stack)}

    def settled(self, policy: Policy) -> dict[str, Any]:
        """The same with every "auto" that the method, the model and the device have settled since."""
        return self.portable() | {name: getattr(policy, name) for name in SETTLED}

    def agrees(self, stored: Mapping[str, Any]) -> bool:
        """Whether a run that was kept with these settings is what this configuration says."""
        mine = json.loads(json.dumps(self.portable(), default=list))
        return all(spelled(k, stored.get(k)) == v or (k in SETTLED and v == "auto") for k, v in mine.items())

    def digest(self) -> str:
        """A short hash of what decides the result, code of the user's own included."""
        from .outside import code_of
        code = code_of(self)
        text = json.dumps(self.portable() | ({"code": code} if code else {}), sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def _check_devices(run: _RunOnly) -> None:
    """Several devices are named well, and nothing else says otherwise. Whether they exist is asked where they are used."""
    assert run.devices is not None
    kind = "cpu" if parse_devices(run.devices)[0] == "cpu" else "cuda"
    if run.device not in ("auto", kind):
        raise ConfigError(f"The options 'device' and 'devices' of the run contradict each other: {run.device!r} and {run.devices!r}. "
                          "Give one of them.")
    if run.engine in ("workers", "ray"):
        what = "are processes on the CPU's cores" if run.engine == "workers" else "uses whatever devices its cluster has"
        raise ConfigError(f"The 'devices' option of the run does not go with engine={run.engine}, which {what}. Leave one of them out.")


def spelled(name: str, value: Any) -> Any:
    """A setting in one spelling, whatever its blanks and quotes."""
    if isinstance(value, str) and name in CALLS:
        return one_spelling(value)
    if isinstance(value, str) and name in CHAINS:
        return "+".join(map(one_spelling, split_plus(value)))
    return value


def _changed(stack: Stack) -> dict[str, Any]:
    """The parts' options that differ from what the names alone give."""
    plain = {p.name: p for p in parse_stack(stack.canonical).parts}
    return {f"{p.name}.{f.name}": getattr(p, f.name) for p in stack.parts for f in dataclasses.fields(p)  # type: ignore[arg-type]
            if getattr(p, f.name) != getattr(plain[p.name], f.name)}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'dbe': {'kappa': 5}} and {'dbe.kappa': 5} mean the same."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"The 'settings' of the run must be a table of part.option = value. Got {settings!r} instead.")
    out: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out.update(flatten_settings(value, path + "."))
        else:
            out[path] = value
    return out


class _SetTwice(ValueError):
    """One name with two values in a file. YAML and JSON would take the last without a word; TOML refuses by itself."""

    def __init__(self, name: Any) -> None:
        super().__init__(f"{name!r} is set twice. Leave one of them.")


class _StrictLoader(yaml.SafeLoader):
    """YAML as `safe_load` reads it, but for names that are set twice, and numbers that begin with 0: 010 is ten, not eight."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Here names are as they were written; later they stand beside those that a merge brought in."""
        node = super().compose_mapping_node(anchor)
        _refuse_twice([key.value for key, _ in node.value])
        return node


def _whole_number(loader: _StrictLoader, node: Any) -> int:
    digits = node.value.lstrip("+-")
    return int(node.value) if digits.isdecimal() else loader.construct_yaml_int(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def _refuse_twice(names: list[Any]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _SetTwice(name)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Settings from a TOML, YAML or JSON file, by its ending."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"There is no configuration file {str(path)!r}.")
    try:
        text = path.read_text(encoding="utf-8-sig")          # some editors of Windows begin a file with a mark of its encoding
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.load(text, _StrictLoader)
        elif path.suffix == ".json":
            values = json.loads(text, object_pairs_hook=_each_once)
        else:
            raise ConfigError(f"The configuration file {str(path)!r} must end in .toml, .yaml, .yml or .json.")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError, _SetTwice) as error:
        raise ConfigError(f"The configuration file {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration file {str(path)!r} must hold a table of settings.")
    return values


def parse_set(pairs: list[str], of_run: bool = False) -> dict[str, Any]:
    """--set part.option=value, read as YAML reads a value. `of_run`: beside -o, which takes the settings of a run."""
    out: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals or "." not in path:
            ours = of_run and equals and path.strip() in RunConfig.names()
            own = f" {path.strip()!r} is a setting of the run: -o {pair.strip()}." if ours else ""
            raise ConfigError(f"--set takes part.option=value, as in --set dbe.kappa=5. Got {pair!r} instead.{own}")
        try:
            value = yaml.load(text, _StrictLoader)
        except (yaml.YAMLError, _SetTwice):
            value = text
        # YAML 1.1 reads 1e-3 as text; numbers written so are numbers
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        out[path.strip()] = value
    return out
