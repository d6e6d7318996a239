"""What `consilience.run` is given as objects: data in memory, and the class of a model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from ..data import Dataset, FederatedData, shifts, splits, transforms
from ..errors import ConfigError
from .config import DIVIDING


def own_data(data: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run on data in memory. Of data that are divided already, none may say otherwise: it would stand in the records.
    Where `load` read them by name, the settings say what it was asked for."""
    if not isinstance(data, (str, Dataset, FederatedData)):
        raise ConfigError("The 'data' of a run must be a name, or what consilience.data.load or from_arrays gives. "
                          f"Got {type(data).__name__} instead. Arrays become data with from_arrays(x, y), or from_arrays(x, y, client) "
                          "where rows have owners.")
    if isinstance(data, FederatedData):
        told = data.description
        known = told | {"clients": data.population, "data_seed": told.get("seed"), "hold_out": [c.name for c in data.held_out]}
        known |= {name: told.get(name) for name in ("train_fraction", "split_file")}
        for name in DIVIDING:
            asked = settings.get(name)
            if asked not in (None, "", (), []) and name in known and not _same(name, asked, known[name], data):
                raise ConfigError(f"The data are divided already, with {name} = {known[name]!r}, so the run cannot have "
                                  f"{name}={settings[name]!r}. Give it to `load`, or the run a data set that is not divided (from_arrays).")
        if settings.get("patience") and settings.get("validation") is None and len(data.table.val.rows):
            settings = settings | {"validation": known.get("validation")}
        if data.asked is not None:                                   # so that whoever opens the run's folder can divide them again
            places = {name: data.asked[name] for name in ("data_dir", "map_data") if settings.get(name) is None}
            divided = {name: data.asked[name] for name in ("data", *DIVIDING) if data.asked[name] not in (None, ())}
            return settings | places | divided
    return settings | {"data": data if isinstance(data, str) else data.name}


def _same(name: str, asked: Any, known: Any, data: FederatedData) -> bool:
    """Whether a setting says what was done, however it is written."""
    if name == "clients":                                            # those held out were counted when the data were divided
        return asked in (known, known + len(data.held_out))
    if name == "hold_out":
        return {str(c) for c in (asked if isinstance(asked, Collection) and not isinstance(asked, str) else [asked])} == {*known}
    if name in ("split_file", "split", "shift", "transform") and not isinstance(asked, (str, Path)):
        return False
    if name == "split_file":
        return Path(asked).name == known
    if name == "split":
        return splits.make(asked).text == known
    if name == "shift":
        return shifts.make(asked).text == known
    if name == "transform":
        scaled = next((s for s in getattr(data.transform, "steps", ()) if isinstance(s, transforms.Normalise)), transforms.Normalise())
        like = Dataset(data.name, data.x, data.y, data.classes, mean=scaled.mean, std=scaled.std, task=data.task)
        return transforms.make(asked, like, lambda: transforms.mean_and_std(data.x, data.table.train.rows)).text == known
    return bool(asked == known)


def own_model(model: Any) -> str | None:
    """A class or a function by its name, which every process and every later look at the run can find it by."""
    if model is None or isinstance(model, str):
        return model
    where, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    if not callable(model) or isinstance(model, nn.Module) or not where or not name.isidentifier():
        raise ConfigError("The 'model' of a run must be a name, or a class or function at the top of a module that makes a "
                          f"torch.nn.Module: initial values are drawn from the run's seed. Got {type(model).__name__} instead.")
    return f"{where}:{name}"
