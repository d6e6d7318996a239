"""What `consilience.run` is given as objects: data in memory, and the class of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..data import Dataset, FederatedData, splits
from ..errors import ConfigError

# settings that say how data are divided
DIVIDING = ("split", "clients", "shift", "train", "validation", "test", "pool", "transform", "data_seed")


def own_data(data: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run on data in memory. Of data that are divided already, none may say otherwise: it would stand in the records."""
    if not isinstance(data, (str, Dataset, FederatedData)):
        raise ConfigError("The 'data' of a run must be a name, or what consilience.data.load or from_arrays gives. "
                          f"Got {type(data).__name__} instead. Arrays become data with from_arrays(x, y), or from_arrays(x, y, client) "
                          "where rows have owners.")
    if isinstance(data, FederatedData):
        known = data.description | {"clients": data.population, "data_seed": data.description.get("seed")}
        for name in DIVIDING:
            asked = splits.make(settings[name]).text if name == "split" and settings.get(name) else settings.get(name)
            if asked is not None and name in known and asked != known[name]:
                raise ConfigError(f"The data are divided already, with {name} = {known[name]!r}, so the run cannot have "
                                  f"{name}={settings[name]!r}. Give it to `load`, or the run a data set that is not divided (from_arrays).")
        if settings.get("patience") and settings.get("validation") is None and len(data.table.val.rows):
            settings = settings | {"validation": known.get("validation")}
    return settings | {"data": data if isinstance(data, str) else data.name}


def own_model(model: Any) -> str | None:
    """A class or a function by its name, which every process and every later look at the run can find it by."""
    if model is None or isinstance(model, str):
        return model
    where, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    if not callable(model) or isinstance(model, nn.Module) or not where or not name.isidentifier():
        raise ConfigError("The 'model' of a run must be a name, or a class or function at the top of a module that makes a "
                          f"torch.nn.Module: initial values are drawn from the run's seed. Got {type(model).__name__} instead.")
    return f"{where}:{name}"
