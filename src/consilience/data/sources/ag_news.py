"""AG News: four kinds of news."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ..text import TextDataset, number_words
from .base import Download, Source, Wanted

_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"


@dataclass(frozen=True)
class AgNews(Source):
    """120,000 + 7,600 short news, from train.csv and test.csv (class 1 to 4, title, description).

    Title and description are joined and cut into words (fastText's protocol): 200 word numbers, 0 pads. The numbers are
    given once the split is known, to words of the training rows only.
    """

    tokens: int = option(200, "words per text; longer ones are cut, shorter ones padded with 0", low=1)
    min_count: int = option(1, "a word has a number of its own if the training rows hold it this often", low=1)

    name = "ag_news"
    title = "120,000 + 7,600 short news, 4 classes"
    kind = "text"
    folders = ("ag_news", "ag_news_csv", "AG_NEWS")
    files = (Wanted("train.csv", md5=("b1a00f826fdfbd249f79597b59e1dc12",)),
             Wanted("test.csv", md5=("d52ea96a97a2d943681189a97654912d",)))
    downloads = (Download(_URL + "train.csv", "ag_news/train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
                 Download(_URL + "test.csv", "ag_news/test.csv", "d52ea96a97a2d943681189a97654912d"))
    how_to_get = "put train.csv and test.csv into the folder 'ag_news' of the data directory."
    default_split = "dirichlet(alpha=1.0)"

    def read_folder(self, folder: Path) -> Dataset:
        train, test = _rows(folder / "train.csv"), _rows(folder / "test.csv")
        x, words = number_words((text for _, text in train + test), self.tokens)
        return TextDataset(name=self.name, x=x, y=torch.tensor([label for label, _ in train + test]), classes=4,
                           class_names=_CLASSES, official_test=torch.arange(len(train), len(train) + len(test)),
                           words=words, min_count=self.min_count)


def _rows(path: Path) -> list[tuple[int, str]]:
    """Labels from 0, and texts."""
    out = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
                    raise DataError(f"Row {number} of {path} must hold a class from 1 to 4, a title and a description. "
                                    f"Got {str(row)[:80]} instead.")
                out.append((int(row[0]) - 1, " ".join(part for part in row[1:] if part)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"The file {path} is not a CSV file in UTF-8: {error}.") from None
    if not out:
        raise DataError(f"The file {path} is empty; rows of class, title and description were expected.")
    return out
