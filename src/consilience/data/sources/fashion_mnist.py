"""Fashion-MNIST: clothing in MNIST's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..dataset import Dataset
from ._idx_images import NAMES, read_four
from .base import Download, Source, Wanted

# As published, and as Debian's package packs them again.
_MD5 = (("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "cf8536b0aa1a6ac5fa3f23001093305c"),
        ("25c81989df183df01b3e8a0aad5dffbe", "10bea18fdb374794d4bb42e356e600c9"),
        ("bef4ecab320f06d8554ea6380940ec79", "f78720b4224f21cce2f2ccf2d7a94c9a"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "0d30e22e447f3c33dab9ed536400ac01"))
_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(frozen=True)
class FashionMnist(Source):
    """60,000 + 10,000 pictures of clothing, 28×28, in the four idx files of MNIST's names, packed or not."""

    name = "fashion_mnist"
    title = "60,000 + 10,000 pictures of clothing, 28×28"
    folders = ("fashion_mnist", "fashion-mnist", "FashionMNIST", "FashionMNIST/raw")
    system_folders = ("/usr/share/datasets/fashion-mnist",)
    files = tuple(Wanted(n, None, m, (n.removesuffix(".gz"),)) for n, m in zip(NAMES, _MD5))
    downloads = tuple(Download(_URL + n, f"fashion_mnist/{n}", m[0]) for n, m in zip(NAMES, _MD5))
    how_to_get = ("on Debian and Ubuntu: apt install dataset-fashion-mnist. Elsewhere put the four files "
                  f"{NAMES[0]} … into the folder 'fashion_mnist' of the data directory.")

    def read_folder(self, folder: Path) -> Dataset:
        x, y, test = read_four([p for _, p in self.sources_of(folder) if p is not None], 10)
        return Dataset(name=self.name, x=x, y=y, classes=10, official_test=test, mean=(0.2860,), std=(0.3530,),
                       class_names=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
                                    "bag", "ankle boot"))
