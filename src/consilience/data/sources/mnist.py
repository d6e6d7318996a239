"""MNIST, with the writer of each digit where QMNIST's table is present."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DataError
from ..dataset import Dataset
from ._files import read_arrays
from ._idx_images import NAMES, read_four
from .base import Download, Source, Wanted

_MD5 = ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c")
_SIZES = (9912422, 28881, 1648877, 4542)
_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
WRITERS = "qmnist_writers.npz"


@dataclass(frozen=True)
class Mnist(Source):
    """60,000 + 10,000 handwritten digits of 28×28 pixels, in the four idx files, packed or not.

    With qmnist_writers.npz (arrays train_writer, test_writer and, to check the order, train_class, test_class) the
    samples carry the group "writer". QMNIST traced them: 539 people wrote the training digits, others the test digits.
    """

    name = "mnist"
    title = "60,000 + 10,000 handwritten digits, 28×28; by writer with QMNIST's table"
    folders = ("mnist", "MNIST", "MNIST/raw")
    files = (*(Wanted(n, s, (m,), (n.removesuffix(".gz"), n.removesuffix(".gz").replace("-idx", ".idx")))
               for n, s, m in zip(NAMES, _SIZES, _MD5)), Wanted(WRITERS, optional=True))
    downloads = tuple(Download(_URL + n, f"mnist/{n}", m) for n, m in zip(NAMES, _MD5))
    how_to_get = f"put the four files {NAMES[0]} … into the folder 'mnist' of the data directory."

    def read_folder(self, folder: Path) -> Dataset:
        files = [p for _, p in self.sources_of(folder) if p is not None]
        x, y, test = read_four(files[:4], 10)
        groups, names = {}, {}
        if (folder / WRITERS).is_file():
            writer = _writers(folder / WRITERS, y, len(y) - len(test))
            groups, names = {"writer": writer}, {"writer": tuple(f"writer{i}" for i in range(int(writer.max()) + 1))}
        return Dataset(name=self.name, x=x, y=y, classes=10, class_names=tuple("0123456789"), official_test=test,
                       groups=groups, group_names=names, mean=(0.1307,), std=(0.3081,))


def _writers(path: Path, y: Tensor, n_train: int) -> Tensor:
    arrays = read_arrays(path)
    for part, n in (("train", n_train), ("test", len(y) - n_train)):
        writers = arrays.get(f"{part}_writer")
        if writers is None or len(writers) != n:
            raise DataError(f"The file {path} must hold an array {part}_writer with {n} entries. "
                            f"Got {'none' if writers is None else len(writers)} instead.")
    writer = torch.cat([torch.from_numpy(arrays[f"{p}_writer"]).long() for p in ("train", "test")])
    if "train_class" in arrays and "test_class" in arrays:
        labels = torch.cat([torch.from_numpy(arrays[f"{p}_class"]).long() for p in ("train", "test")])
        if len(labels) != len(y) or not torch.equal(labels, y):
            raise DataError(f"The file {path} does not belong to these digits: its classes differ from the label files.")
    return writer
