"""PFLlib's folders: one file per client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._bring import find_path, from_arrays
from ._files import read_arrays
from .base import Source

_CONVERT = ("import glob, numpy as np; [np.savez(f, **np.load(f, allow_pickle=True)['data'].tolist()) "
            "for f in glob.glob('{}/*/*.npz')]")


@dataclass(frozen=True)
class PfLlib(Source):
    """train/0.npz, train/1.npz … and test/0.npz …: one file per client and part, each with the arrays x and y.

    PFLlib itself writes a pickled dictionary, which is not read because it can run code; the error says how to convert
    files that you trust. Clients are the group "client"; the two folders are the published parts.
    """

    path: str = option("", "the folder that holds train/ and test/")

    name = "pfllib"
    title = "one .npz per client, in PFLlib's folders train/ and test/"
    kind = "yours"
    needs_path = True
    how_to_get = 'write pfllib(path="…").'
    default_split = "by_group(group='client')"
    default_test = "published"

    def read(self, directory: str | Path | None = None) -> Dataset:
        root = find_path(self.path, self.name, directory)
        xs, ys, owners, roles = [], [], [], []
        for part, role in (("train", 0), ("test", 2)):
            files = sorted((root / part).glob("*.npz"), key=_number)
            if not files:
                raise DataError(f"The folder {root / part} holds no client files (0.npz, 1.npz, …).")
            for path in files:
                held = _client(path, root)
                if len(held["x"]) != len(held["y"]):
                    raise DataError(f"The file {path} has {len(held['x'])} samples but {len(held['y'])} labels.")
                xs.append(held["x"])
                ys.append(held["y"].reshape(-1))
                owners += [_number(path)] * len(held["y"])
                roles += [role] * len(held["y"])
        shapes = {x.shape[1:] for x in xs}
        if len(shapes) > 1:
            raise DataError(f"The clients of {root} have samples of different shapes: {', '.join(map(str, sorted(shapes)))}.")
        base = from_arrays(np.concatenate(xs), np.concatenate(ys), np.asarray(owners), name=root.name, where=str(root))
        role_of = torch.tensor(roles)
        return Dataset(name=base.name, x=base.x, y=base.y, classes=base.classes, class_names=base.class_names, groups=base.groups,
                       group_names={"client": tuple(f"client{n}" for n in base.group_names["client"])}, roles=role_of,
                       official_test=(role_of == 2).nonzero().flatten())


def _client(path: Path, root: Path) -> dict[str, np.ndarray]:
    try:
        held = read_arrays(path)
    except DataError as error:
        if "pickled" not in str(error):
            raise
        raise DataError(f"The file {path} holds a pickled dictionary, as PFLlib writes it. Such files can run code, so "
                        f"they are not read. If you trust them, convert all of them:\n"
                        f"  python -c \"{_CONVERT.format(root)}\"") from None
    if "x" not in held or "y" not in held:
        raise DataError(f"The file {path} must hold the arrays x and y. It holds {', '.join(held) or 'none'}.")
    return held


def _number(path: Path) -> int:
    """The client's number: '7.npz', or 'train7_.npz' as some releases name it."""
    digits = "".join(c for c in path.stem if c.isdigit())
    if not digits:
        raise DataError(f"The file {path} must be named by its client's number, as 0.npz.")
    return int(digits)
