"""Whether what a recipe names exists, said when it is loaded and not after an hour of training; and whether its data are here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import options
from ..data import directory as places
from ..data import shifts, sources, splits
from ..data.transforms import NAMED, STEPS
from ..errors import ConsilienceError, unknown
from ..models.registry import settings_of
from ..parts.stack import parse_stack, split_tokens
from ..runs.config import RunConfig

# Recipes have hundreds of cells and few different methods and columns, so each is checked once. Looking up a part asks the
# installed packages for theirs, which takes far longer than everything else here.


@lru_cache(maxsize=1024)
def _owners(method: str) -> frozenset[str]:
    names = (t.partition("(")[0] for t in split_tokens(method))
    return frozenset([*names, *(p.name for p in parse_stack(method).parts)])


def applies(path: str, method: str) -> bool:
    """Whether a setting such as mr.kappa or dbe.kappa concerns a method: its owner is one of the method's names or parts."""
    return path.partition(".")[0] in _owners(method)


@dataclass(frozen=True)
class MethodFacts:
    """A method as a run's record has it: its name in one order, and the options that differ from what the name alone gives."""

    canonical: str
    changed: Mapping[str, Any]
    options: Mapping[str, Any]                 # all of them, by part.option


def method_facts(method: str, settings: Mapping[str, Any]) -> MethodFacts:
    return _method_facts(method, json.dumps(dict(settings), sort_keys=True))


@lru_cache(maxsize=4096)
def _method_facts(method: str, settings: str) -> MethodFacts:
    config = RunConfig.make({"method": method, "settings": json.loads(settings)})
    stored = json.loads(json.dumps(config.portable(), default=list))
    options = {f"{p.name}.{f.name}": getattr(p, f.name) for p in config.stack().parts for f in dataclasses.fields(p)}  # type: ignore[arg-type]
    return MethodFacts(stored["method"], stored["settings"], options)


def run_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run beside its method, defaults included."""
    return json.loads(_run_facts(json.dumps({k: v for k, v in values.items() if k not in ("method", "settings")}, sort_keys=True)))


@lru_cache(maxsize=4096)
def _run_facts(values: str) -> str:
    return json.dumps(RunConfig.make({**json.loads(values), "method": "fedavg"}).portable(), default=list)


def check_method(method: str, settings: Mapping[str, Any]) -> None:
    """The method and its options exist, and its parts go together."""
    _check_method(method, json.dumps(dict(settings), sort_keys=True))


@lru_cache(maxsize=4096)
def _check_method(method: str, settings: str) -> None:
    parse_stack(method, json.loads(settings)).method()


def check_run(values: Mapping[str, Any]) -> None:
    """All other settings of a run, and what they name, without reading any data."""
    _check_run(json.dumps(dict(values), sort_keys=True))


@lru_cache(maxsize=4096)
def _check_run(values: str) -> None:
    run = RunConfig.make({**json.loads(values), "method": "fedavg"}).run
    for source in (run.data, *filter(None, (run.proxy,))):
        sources.make(source)
    if run.split:
        splits.make(run.split)
    if run.shift:
        shifts.make(run.shift)
    if run.transform:
        for part in shifts.split_plus(run.transform):
            name, given = options.parse_call(part, "A transform")
            if name in STEPS:
                options.build(STEPS[name], given, f"transform {name!r}")
            elif name not in NAMED:
                raise unknown("transform", name, [*STEPS, *NAMED])
    if run.model and ":" not in run.model.partition("(")[0]:
        settings_of(run.model)


def absent_source(values: Mapping[str, Any], data_dir: str | Path | None = None) -> str | None:
    """The data set of a run that cannot be read here, by name, or None."""
    for text in filter(None, (values.get("data", "digits"), values.get("proxy"))):
        source = sources.make(text)
        if source.embedded or source.needs_path:
            continue
        try:
            places.find(source, data_dir)
        except ConsilienceError:
            return source.name
    return None


def missing_data(values: Mapping[str, Any], data_dir: str | Path | None = None) -> str | None:
    """Why the data of a run cannot be read here, or None."""
    name = absent_source(values, data_dir)
    return f"the data set {name} is not in the data directory (consilience data info {name} says how to get it)" if name else None
