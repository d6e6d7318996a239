"""Splits as files: who owns which rows, with the hash of the split and the fingerprint of the data it divides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .federated import ClientRows, FederatedData, no_rows

FORMAT = "consilience split 1"


def save_split(data: FederatedData, path: str | Path) -> None:
    """Write the rows of every client as JSON, for `load(…, split_file=path)` here or on another machine."""
    document = {"format": FORMAT, "data": data.name, "fingerprint": data.description.get("fingerprint"),
                "hash": data.split_hash(), "description": data.description, "test": data.test.tolist(),
                "clients": [{"name": c.name, "train": c.train.tolist(), "val": c.val.tolist(), "test": c.test.tolist()}
                            for c in data.clients]}
    Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def read_split(path: str | Path, name: str, fingerprint: str) -> tuple[list[ClientRows], Tensor, dict[str, Any]]:
    """The clients' rows, the global test rows and the recorded description, after every check."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"The split file {str(path)!r} does not exist. Write one with save_split or 'data show --save'.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"The split file {str(path)!r} cannot be read as JSON: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"The file {str(path)!r} is not a split: its 'format' must be {FORMAT!r}.")
    if document.get("data") != name:
        raise DataError(f"The split file {str(path)!r} divides {document.get('data')!r}, not {name!r}.")
    if document.get("fingerprint") != fingerprint:
        raise DataError(f"The split file {str(path)!r} was made for {name!r} with fingerprint {document.get('fingerprint')}, but "
                        f"the files read here have {fingerprint}. Its rows would mean other samples: use the same files.")
    try:
        clients = [ClientRows(str(c["name"]), *(torch.tensor(c[k], dtype=torch.int64) for k in ("train", "val", "test")))
                   for c in document["clients"]]
        test = torch.tensor(document["test"], dtype=torch.int64)
        found = FederatedData(name, no_rows(), no_rows(), 1, tuple(clients), test).split_hash()
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"The split file {str(path)!r} lacks or garbles a list of rows ({error!r}).") from None
    if found != document.get("hash"):
        raise DataError(f"The split file {str(path)!r} was changed: its rows hash to {found}, but it says {document.get('hash')}.")
    return clients, test, document.get("description") or {}
