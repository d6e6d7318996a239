"""From a source's name to a federated data set, in one call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import memory, rng
from ..core.population import RowTable
from ..errors import ConfigError, did_you_mean
from . import shifts, splits, transforms
from .cache import read_mapped
from .dataset import Dataset
from .federated import ClientTable, FederatedData, no_rows
from .sources import SOURCES, Source, make
from .split_file import read_split
from .splits.fractions import train_fraction as keep_fraction
from .splits.holdout import hold_out as keep_apart
from .text import PADDING, CharacterDataset, TextDataset, apply_vocabulary

TESTS = ("clients", "global", "both", "published")
POOLS = ("train", "all")
_PIECE = 2**26               # bytes looked at in one go


def load(source: str | Source | Dataset, split: str | None = None, clients: int | None = None, seed: int = 0, *,
         shift: str | None = None, train: float | None = None, validation: float | None = None, test: str | None = None,
         pool: str | None = None, data_dir: str | Path | None = None, transform: str | None = None,
         split_file: str | Path | None = None, train_fraction: float | None = None,
         hold_out: Sequence[int | str] = (), map_data: bool = False) -> FederatedData:
    """Read a data set, divide it among clients, and cut each client's rows into train, validation and test.

    source      a name such as 'cifar10' or 'folder(path="photos")', a `Source`, or a `Dataset` of your own.
    split       for example 'dirichlet(alpha=0.1)'; without it, the source's own default, or for your own data by client or
                domain where it has them.
    clients     how many; without it, 10, or as many as a split by domain or writer finds.
    seed        the split, the cut into parts and the shift are drawn from it.
    shift       what makes clients differ in their inputs, for example 'rotation(step=15)'.
    test        "clients": what `train` and `validation` leave of every client is its test part. "global": the published
                test set, belonging to no client. "both". "published": every row keeps the part its publisher gave it.
                Without it "clients", or "published" where the source says so and no fraction is given.
    train       fraction of a client's rows: 0.75 where clients have a test part, else all that validation leaves.
    validation  fraction of a client's rows; 0 without it.
    pool        which rows are divided: "train", all but the published test set; "all", both merged (as DBE does). Without it
                "train", except where people are the clients (uci_har).
    transform   what is done to a batch, for example 'crop+flip+normalise'. Without it the source's own, or normalisation
                where the data set has a mean, or nothing.
    train_fraction  keep only this fraction of every client's training rows (FedFA's Fig. 2); the other parts stay whole.
    hold_out    clients, by name or number, that are scored but never trained on (leave-one-client-out, new participants).
    map_data    keep the samples in a file of the data directory, written the first time, and map them instead of holding them in memory.
    split_file  a file of `save_split`. It replaces split, clients, seed and the parts; a shift it records is applied.
    """
    asked = {"split": split, "clients": clients, "data_seed": seed, "shift": shift, "train": train, "validation": validation, "test": test,
             "pool": pool, "data_dir": data_dir and str(data_dir), "transform": transform, "split_file": split_file and str(split_file),
             "train_fraction": train_fraction, "map_data": map_data}
    own, dataset, text = _read(source, data_dir, clients if split is None and split_file is None else None, map_data)
    defaults: Source | type[Source] = own or Source
    about: dict[str, Any] = {"source": text, "samples": len(dataset.y), "fingerprint": fingerprint_of(dataset)}
    if split_file is not None:
        listed, global_test, recorded = read_split(split_file, dataset.name, about["fingerprint"])
        about |= {k: recorded.get(k) for k in ("split", "clients", "shift", "seed", "train", "validation", "test", "pool")}
        about["split_file"] = Path(split_file).name
        rows = ClientTable.of(listed)
        shift, seed = shift or recorded.get("shift"), int(recorded.get("seed", seed))
    else:
        if test is None:
            test = defaults.default_test if train is None and validation is None else "clients"
        pool, validation = pool or defaults.default_pool, validation or 0.0
        _check(dataset, test, pool, train, validation)
        if train is None and test in ("clients", "both"):
            train = 0.75
        how = splits.make(split or (own and own.default_split) or natural_split(dataset))
        assignment = _assign(how, dataset, _pool(dataset, test, pool), clients, defaults.default_clients,
                             rng.key(seed, "data", "split"))
        rows = _parts(dataset, assignment, seed, train, validation, test)
        global_test = dataset.official_test if test in ("global", "both") else no_rows()
        about |= {"split": how.text, "clients": len(rows), "seed": seed, "train": train, "validation": validation,
                  "test": test, "pool": pool}
    if train_fraction is not None:
        key = rng.key(seed, "data", "train_fraction")
        fewer = RowTable.of([keep_fraction(own, train_fraction, rng.key(key, i)) for i, own in enumerate(rows.train)])
        rows = ClientTable(rows.names, fewer, rows.val, rows.test)
        about["train_fraction"] = train_fraction
    x, y, about["shift"] = _shift(dataset, shift, rows, seed)
    if isinstance(dataset, TextDataset):
        known = [own for i, (name, own) in enumerate(zip(rows.names, rows.train)) if name not in hold_out and i not in hold_out]
        x, about["vocabulary"] = apply_vocabulary(dataset, torch.cat(known))
    elif isinstance(dataset, CharacterDataset):
        about["vocabulary"] = {"size": dataset.vocabulary, "padding": PADDING, "tokens": x.shape[1]}
    elif x.dtype == torch.int64 and x.dim() == 2:           # tokens that users numbered themselves
        about["vocabulary"] = {"size": int(x.max()) + 1, "tokens": x.shape[1]}
    trained = lambda: transforms.mean_and_std(x, torch.cat([own for i, (name, own) in enumerate(zip(rows.names, rows.train))
                                                            if name not in hold_out and i not in hold_out]))
    batch = transforms.make(transform or defaults.default_transform or ("normalise" if dataset.mean else "none"), dataset, trained)
    about["transform"] = batch.text
    about["class_names"] = list(dataset.class_names)
    if memory.file_of(x) is not None:                       # what belongs to the samples must not fill the memory that they leave free
        y, rows = memory.spill(y), ClientTable(rows.names, *(RowTable(memory.spill(t.rows), t.starts) for t in rows.parts))
    data = FederatedData(name=dataset.name, x=x, y=y, classes=dataset.classes, clients=rows, test=global_test,
                         transform=batch, description=about, task=dataset.task, feature_names=dataset.feature_names)
    if hold_out:
        data = keep_apart(data, hold_out)[0]
        about = data.description
    if not isinstance(source, Dataset) and (typed := _typed(source)) is not None and seed >= 0:     # runs have no seed below 0
        held = [rows.names.index(c) if isinstance(c, str) else c for c in hold_out]         # a name may look like a number
        object.__setattr__(data, "_asked", {**asked, "data": typed, "hold_out": tuple(str(c) for c in held)})
    about["hash"] = data.split_hash()
    memory.let_go([data.x, data.y, *(t.rows for t in data.table.parts)])
    memory.trim()
    return data


def natural_split(dataset: Dataset) -> str:
    """By client, or by the only group there is; else by labels, and where samples have masks, at random."""
    group = "client" if "client" in dataset.groups else next(iter(dataset.groups), None) if len(dataset.groups) == 1 else None
    if group:
        return f"by_group(group={group!r})"
    return Source.default_split if dataset.task == "classification" else "iid"


def _shift(dataset: Dataset, shift: str | None, rows: ClientTable, seed: int) -> tuple[Tensor, Tensor, str | None]:
    """Samples and masks as the clients see them, and the shift with every setting written out."""
    if not shift:
        return dataset.x, dataset.y, None
    made, key = shifts.make(shift), rng.key(seed, "data", "shift")
    owned = list(rows.everything())
    y = dataset.y
    if made.moves_pixels and dataset.task == "segmentation":
        y = made.apply(y[:, None], owned, key)[:, 0]
    return made.apply(dataset.x, owned, key), y, made.text


def fingerprint_of(dataset: Dataset) -> str:
    """A hash of the samples and labels in their order: a split's rows mean something only for these."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (dataset.x, dataset.y):
        digest.update(str((tuple(tensor.shape), str(tensor.dtype))).encode())
        for piece in tensor.split(max(1, _PIECE // max(1, tensor[:1].numel() * tensor.element_size()))):
            digest.update(piece.contiguous().view(torch.uint8).numpy().data if piece.numel() else b"")
            memory.let_go([tensor])
    return digest.hexdigest()


def _read(source: str | Source | Dataset, data_dir: str | Path | None, clients: int | None,
          map_data: bool) -> tuple[Source | None, Dataset, str]:
    if isinstance(source, Dataset):
        return None, source, source.name
    own = make(source) if isinstance(source, str) else source
    own = own.for_clients(clients) if clients is not None else own
    return own, read_mapped(own, data_dir) if map_data else own.read(data_dir), own.text


def _typed(source: str | Source) -> str | None:
    """A source as a run's settings name it; None where no name leads to it, as to a class of the user's own."""
    if isinstance(source, str):
        return source
    return source.text if SOURCES.get(source.name) is type(source) and make(source.text) == source else None


def _check(dataset: Dataset, test: str, pool: str, train: float | None, validation: float) -> None:
    for what, value, known in (("test", test, TESTS), ("pool", pool, POOLS)):
        if value not in known:
            raise ConfigError(f"{what!r} must be one of {', '.join(known)}. Got {value!r} instead."
                              f"{did_you_mean(str(value), known)}")
    if test in ("global", "both"):
        if pool == "all":
            raise ConfigError(f"test={test!r} keeps the published test set apart, but pool='all' gives its rows to clients. "
                              f"Choose pool='train' or test='clients'.")
        if not len(dataset.official_test):
            raise ConfigError(f"Data set {dataset.name!r} has no published test set, so test={test!r} has nothing to score on. "
                              f"Use test='clients'.")
    if test == "published" and dataset.roles is None:
        raise ConfigError(f"Data set {dataset.name!r} has no published parts. Use test='clients' or test='global'.")
    for what, fraction in (("train", train), ("validation", validation)):
        if fraction is not None and not 0 <= fraction <= 1:
            raise ConfigError(f"{what!r} must be a fraction from 0 to 1. Got {fraction!r} instead.")
    if (train or 0) + validation > 1 + 1e-9:
        raise ConfigError(f"train ({train}) and validation ({validation}) add up to more than 1.")
    if test == "global" and train is not None and abs(train + validation - 1) > 1e-9:
        raise ConfigError(f"With test='global' clients keep no test rows, so train and validation must add up to 1. "
                          f"Got {train} and {validation}; leave train out, or use test='both'.")


def _pool(dataset: Dataset, test: str, pool: str) -> Tensor:
    """The rows to divide."""
    keep = torch.ones(len(dataset.y), dtype=torch.bool)
    if pool == "train" and test != "published":
        keep[dataset.official_test] = False
    if dataset.roles is not None and test == "published":
        keep &= dataset.roles >= 0
    return keep.nonzero().flatten()


def _assign(split: splits.Split, dataset: Dataset, rows: Tensor, clients: int | None, default: int,
            key: Tensor) -> splits.Assignment:
    """Splits by domain or writer count their clients by themselves; others are given the default where none was asked for."""
    if clients is None:
        try:
            return split.assign(dataset, rows, None, key)
        except ConfigError:     # the number is missing, or something that the next line says again
            clients = default
    return split.assign(dataset, rows, clients, key)


def _parts(dataset: Dataset, assignment: splits.Assignment, seed: int, train: float | None, validation: float,
           test: str) -> ClientTable:
    """Every client's rows as train, validation and test, all clients at once: there may be 100,000 of them."""
    table = assignment.rows
    owner, sizes = table.owner, table.sizes
    if test == "published" and dataset.roles is not None:
        role = dataset.roles[table.rows]
    else:
        # Keyed by the client's number, so that one client's cut does not depend on another's size.
        order = rng.permutations(rng.keys(seed, "data", "parts", each=range(len(table))), sizes)
        train_sizes, val_sizes = counts(sizes, train, validation)
        place = torch.empty_like(order)                          # of a row in its client's random order
        place[table.starts[owner] + order] = torch.arange(len(order)) - table.starts[owner]
        role = (place >= train_sizes[owner]).long() + (place >= (train_sizes + val_sizes)[owner])
    return ClientTable(assignment.names, *(RowTable.grouped(table.rows[role == r], owner[role == r], len(table)) for r in range(3)))


def counts(sizes: Tensor, train: float | None, validation: float) -> tuple[Tensor, Tensor]:
    """Of so many rows each: ⌊train·n⌋ to train on and ⌊validation·n⌋ to validate on; what is left is for the test.

    Where the fractions leave no test part (train None, or a sum of 1), what rounding leaves goes to train. A client with
    rows has at least one to train on.
    """
    share = lambda fraction: (sizes.double() * fraction + 1e-9).floor().long()
    val = share(validation)
    if train is None or train + validation > 1 - 1e-9:
        return sizes - val, val
    out = torch.maximum(share(train), sizes.clamp(max=1))
    return out, torch.minimum(val, sizes - out)


def cut(rows: Tensor, train: float | None, validation: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled rows as train, validation and test, each sorted; sizes are those of `counts`."""
    n_train, n_val = (int(n) for n in counts(torch.tensor([len(rows)]), train, validation))
    train_rows, val_rows, test_rows = (p.sort().values for p in rows.split([n_train, n_val, len(rows) - n_train - n_val]))
    return train_rows, val_rows, test_rows
