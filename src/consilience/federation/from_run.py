"""From a simulation to a federation: what a run's folder says of method, model and training, as settings of a federation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines.flower.settings import RUN_NAMES
from ..errors import DataError
from ..runs.files import read_json
from ..runs.reload import no_run
from .site import ADAPTERS

# What a simulation may do to its clients and a federation does not: sites differ and fail by themselves.
LEFT = ("shift", "train_fraction", "hold_out", "dropout")


@dataclass(frozen=True)
class Simulated:
    """A run as the settings of a federation with the same method."""

    values: dict[str, Any]               # as `init` takes them
    like: str                            # the run's data, whose form sites must have
    name: str                            # of the data set: it decides the default model
    cut: str                             # what sites add to their data to train on the run's rows; empty where that cannot be said
    left: list[str] = field(default_factory=list)


def read_run(folder: str | Path) -> Simulated:
    """The settings of a run's folder that a federation has as well."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise no_run(Path(folder))
    held = read_json(path)
    try:
        config, about = dict(held["config"]), dict(held["data"])
        values = {k: v for k, v in config.items() if k in RUN_NAMES and k not in LEFT and v is not None}
        values |= {f"settings.{k}": v for k, v in config["settings"].items()}
        values |= {"sites": about["clients"], "classes": about["classes"], "transform": about["transform"],
                   "class_names": tuple(about.get("class_names") or ())}
        if about.get("vocabulary"):
            values["vocabulary"] = about["vocabulary"]["size"]
        names = values["class_names"]
        if names and all(n.isdecimal() for n in names):
            del values["class_names"]                    # whole numbers are taken as they are
        cut = (f"train={about['train']}, validation={about['validation']}, seed={about['seed']}"
               if about.get("test") == "clients" and about.get("train") is not None else "")
        left = [f"{k}={config[k]}" for k in LEFT if config.get(k)]
        return Simulated(values, str(config["data"]), str(about["name"]), cut, left)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"The file {str(path)!r} is not that of a run: {error!r} was expected in it. Make the run again.") from None


def cut_of(run: Simulated) -> str:
    """How sites get the run's very rows, in words for whoever sets them up; empty where the run's clients are no sites."""
    if not run.cut or run.like.partition("(")[0] not in ADAPTERS:
        return ""
    return (f"For the run's own rows each site adds {run.cut} to its --data, and numbers follow the order of the run's clients "
            f"(consilience data show).")
