"""A site's own data, from a small adapter: a folder of images, arrays, a table, or a Python function of the site's.

    folder(path="/data/scans", size=64)            images in class folders
    arrays(path="/data/site.npz")                  arrays x and y; pickled objects are refused
    table(path="/data/patients.csv", label="dx")   CSV or Parquet, numbers as features
    hospital.reader:load(ward=3)                   a function that gives (x, y) or a consilience Dataset

All take train=, validation= and seed=: how the site's rows are cut into parts, drawn from the seed and the site's number as those of a
client are in a simulation. Rows that the
data themselves set apart for testing (an array `test`, folders train and test) are the test part.

Labels must mean the same at every site, also at one that lacks a class. Whole numbers are taken as they are; text (class folders,
names in a column) is numbered by the federation's class names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..data import SOURCES, ClientRows, Dataset, FederatedData, from_arrays
from ..data.dataset import in_columns
from ..data.load import cut, fingerprint_of
from ..data.text import TextDataset
from ..errors import ConfigError, DataError, did_you_mean
from ..models.user import find_callable
from ..options import build, coerce, describe, parse_call

ADAPTERS = ("folder", "arrays", "table")
TRAIN, VALIDATION = 0.75, 0.1
_PARTS: dict[str, tuple[Any, Any]] = {"train": (float, TRAIN), "validation": (float, VALIDATION), "seed": (int, 0)}


def load_site(spec: str, *, number: int = 0, classes: int | None = None, class_names: Sequence[str] = (),
              feature_names: Sequence[str] = (), alone: bool = False) -> FederatedData:
    """What an adapter names, as data with one client, whose rows are the site's train, validation and test parts.

    `number` is the site's: its rows are cut as those of the client of that number are in a simulation.
    `classes`, `class_names` and `feature_names` are what the federation agreed on; labels beyond them are refused, and a table's columns
    are taken by their names. `alone` is for a look at data before an app is known: names of classes are then numbered as the site has them.
    """
    dataset, how = read_adapter(spec)
    if isinstance(dataset, TextDataset):
        raise DataError(f"The site's data ({spec}) are words that it numbers in the order in which it meets them: a number would mean "
                        "another word at every site. Agree on a vocabulary, and give the texts as arrays of its numbers (samples, tokens).")
    dataset = in_columns(dataset, feature_names, f"The site's data ({spec})", "the federation agreed on")
    named = alone and not class_names and _has_names(dataset)
    labels = _labels(dataset, spec, tuple(dataset.class_names if named else class_names))
    found = int(labels.max()) + 1 if len(labels) else 0
    count = classes or len(class_names) or max(found, dataset.classes)
    if found > count:
        raise DataError(f"The site's data ({spec}) hold the label {found - 1}, but the federation has {count} classes: labels must be 0 to "
                        f"{count - 1}.")
    _check_parts(how, spec)
    rows = _rows(dataset, number, **how)
    if not len(rows.train):
        raise DataError(f"The site's data ({spec}) leave no sample to train on.")
    about = {"source": spec, "samples": len(labels), "fingerprint": fingerprint_of(dataset), "split": "one site", **how,
             **({"class_names": list(dataset.class_names)} if named else {})}
    return FederatedData(dataset.name, dataset.x, labels, count, (rows,), description=about, task=dataset.task)


def join_sites(sites: Sequence[FederatedData]) -> FederatedData:
    """The sites' data as one data set with a client each, in order: what a simulation of the same federation trains on."""
    starts = [0]
    for site in sites:
        starts.append(starts[-1] + len(site.x))
    clients = tuple(ClientRows(f"site-{i}", *(part + start for part in site.clients[0][1:]))
                    for i, (site, start) in enumerate(zip(sites, starts)))
    return FederatedData("sites", torch.cat([s.x for s in sites]), torch.cat([s.y for s in sites]), max(s.classes for s in sites), clients,
                         description={"source": "sites", "split": "sites", "clients": len(sites)}, task=sites[0].task)


def describe_site(data: FederatedData) -> dict[str, Any]:
    """What an operator wants to see before a site joins: sizes, shape and labels. Nothing of it is sent."""
    rows = data.clients[0]
    counts = torch.bincount(data.y[rows.train].reshape(-1), minlength=data.classes).tolist()
    return {"train": len(rows.train), "validation": len(rows.val), "test": len(rows.test), "sample": list(data.x.shape[1:]),
            "input": str(data.x.dtype).removeprefix("torch."), "classes": data.classes, "training_labels": counts,
            **({"class_names": data.description["class_names"]} if "class_names" in data.description else {})}


def read_adapter(spec: str) -> tuple[Dataset, dict[str, Any]]:
    """The data set an adapter names, and how its rows are cut."""
    where, colon, call = spec.partition(":") if _is_entry_point(spec) else ("", "", spec)
    name, values = parse_call(call, "A site's data")
    how = {k: coerce(values.pop(k, default), kind, f"The {k!r} option of a site's data") for k, (kind, default) in _PARTS.items()}
    if colon:
        return _from_function(where, name, values, spec), how
    if name not in ADAPTERS:
        raise ConfigError(f"Unknown adapter {name!r} for a site's data.{did_you_mean(name, ADAPTERS)} A Python function is written "
                          "package.module:function.")
    options = {row["name"] for row in describe(SOURCES[name])}
    if strange := next((key for key in values if key not in options), None):
        raise ConfigError(f"adapter {name!r} has no option {strange!r}.{did_you_mean(strange, {*options, *_PARTS})}")
    return build(SOURCES[name], values, f"adapter {name!r}").read(Path.cwd()), how


def _is_entry_point(spec: str) -> bool:
    """Whether a colon stands before the first bracket; paths in brackets may hold colons too."""
    return ":" in spec.partition("(")[0]


def _from_function(where: str, name: str, values: dict[str, Any], spec: str) -> Dataset:
    function = find_callable(where.strip(), name, "function")
    try:
        made = function(**values)
    except TypeError as error:
        raise ConfigError(f"The site's data function {spec!r} could not be called: {error}.") from error
    if isinstance(made, Dataset):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        x, y = made
        return _plain(x, y, spec)
    raise DataError(f"The site's data function {spec!r} must give (x, y) or a consilience.data.Dataset. Got {type(made).__name__} instead.")


def _plain(x: Any, y: Any, spec: str) -> Dataset:
    """Arrays as they are; whole-number labels are not renumbered."""
    tensor = torch.as_tensor(y) if not isinstance(y, (list, tuple)) or not any(isinstance(v, str) for v in y) else None
    whole = tensor is not None and not tensor.is_floating_point() and tensor.numel() and int(tensor.min()) >= 0
    return from_arrays(x, y, name="site", classes=max(int(tensor.max()) + 1, 2) if whole and tensor is not None else None, where=spec)


def _has_names(dataset: Dataset) -> bool:
    """Whether classes are words, which only an agreement can number alike at all sites."""
    return dataset.task == "classification" and not all(own.isdecimal() for own in dataset.class_names)


def _labels(dataset: Dataset, spec: str, agreed: tuple[str, ...]) -> Tensor:
    """Labels as the federation numbers them."""
    if dataset.task != "classification" or not dataset.class_names:
        return dataset.y
    if agreed:
        place = {name: i for i, name in enumerate(agreed)}
        for own in dataset.class_names:
            if own not in place:
                raise DataError(f"The site's data ({spec}) have the class {own!r}, which the federation does not know."
                                f"{did_you_mean(own, agreed)}")
        return torch.tensor([place[own] for own in dataset.class_names])[dataset.y]
    if all(own.isdecimal() for own in dataset.class_names):            # whole numbers with a gap: this site lacks a class
        return torch.tensor([int(own) for own in dataset.class_names])[dataset.y]
    shown = ", ".join(dataset.class_names[:4]) + (", …" if len(dataset.class_names) > 4 else "")
    raise DataError(f"The site's labels ({spec}) are text ({shown}). Sites may lack classes, so the federation must agree on their "
                    f"order: name all of them in it where the app is made, as in -o class_names={','.join(dataset.class_names)}")


def _check_parts(how: dict[str, Any], spec: str) -> None:
    for part in ("train", "validation"):
        if not 0 <= how[part] <= 1:
            raise ConfigError(f"The {part!r} option of a site's data must be a fraction from 0 to 1. Got {how[part]!r} instead.")
    if how["train"] + how["validation"] > 1 + 1e-9:
        raise ConfigError(f"train ({how['train']}) and validation ({how['validation']}) of a site's data ({spec}) add up to more than 1.")


def _rows(dataset: Dataset, number: int, train: float, validation: float, seed: int) -> ClientRows:
    key = rng.key(seed, "data", "parts", number)
    if dataset.roles is not None:
        return ClientRows("site", *((dataset.roles == r).nonzero().flatten() for r in (0, 1, 2)))
    test = dataset.official_test
    if len(test):
        keep = torch.ones(len(dataset.y), dtype=torch.bool)
        keep[test] = False
        mine = keep.nonzero().flatten()
        train_rows, val_rows, _ = cut(mine[rng.permutation(key, len(mine))], None, validation)
        return ClientRows("site", train_rows, val_rows, test.sort().values)
    return ClientRows("site", *cut(rng.permutation(key, len(dataset.y)), train, validation))
