"""Text as numbers: the tokens of fastText's protocol, and a vocabulary that sees training clients only.

A source numbers every word it meets (`TextDataset.words`), so that samples are tensors from the start. Once the training
rows are known, `apply_vocabulary` gives the words that occur in them their final numbers and makes the others unknown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .dataset import Dataset

PADDING, UNKNOWN = 0, 1

# Punctuation stands alone, except that double quotes vanish and colons and semicolons separate words.
_SPACED = re.compile(r"(['.,()!?])")
_GONE = re.compile(r'"')
_SEPARATORS = re.compile(r"<br />|[;:]")


@dataclass(frozen=True, repr=False)
class TextDataset(Dataset):
    """x holds word numbers: 0 pads, n > 0 is words[n − 1]."""

    words: tuple[str, ...] = ()
    min_count: int = 1                  # a word must occur this often in the training rows to have a number


@dataclass(frozen=True, repr=False)
class CharacterDataset(Dataset):
    """x holds character numbers of fixed alphabets: 0 pads, the largest is vocabulary − 1."""

    vocabulary: int = 0


def tokens(text: str) -> list[str]:
    """Lower-case words and punctuation marks, as torchtext's basic_english makes them."""
    text = _GONE.sub("", _SPACED.sub(r" \1 ", text.lower()))
    return _SEPARATORS.sub(" ", text).split()


def number_words(texts: Iterable[str], length: int) -> tuple[Tensor, tuple[str, ...]]:
    """(N, length) word numbers in the order of first appearance, cut or padded with 0, and the words."""
    numbers: dict[str, int] = {}
    rows = []
    for text in texts:
        ids = [numbers.setdefault(word, len(numbers) + 1) for word in tokens(text)[:length]]
        rows.append(torch.tensor(ids + [PADDING] * (length - len(ids)), dtype=torch.int32))
    if not rows:
        raise DataError("There is no text to read.")
    return torch.stack(rows).long(), tuple(numbers)


def training_vocabulary(dataset: TextDataset, training: Tensor) -> list[int]:
    """The source's numbers of the words in the training rows, the most frequent first.

    Words of equal count are ordered alphabetically, so that the result does not depend on the order of rows.
    """
    counts = torch.bincount(dataset.x[training].flatten(), minlength=len(dataset.words) + 1)
    counts[PADDING] = 0
    held = counts.tolist()
    known = (counts >= max(dataset.min_count, 1)).nonzero().flatten().tolist()
    return sorted(known, key=lambda n: (-held[n], dataset.words[n - 1]))


def apply_vocabulary(dataset: TextDataset, training: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """x with final numbers (padding 0, unknown 1, then the words of the training rows), and what to record."""
    order = training_vocabulary(dataset, training)
    final = torch.full((len(dataset.words) + 1,), UNKNOWN)
    final[PADDING] = PADDING
    final[torch.tensor(order, dtype=torch.int64)] = torch.arange(2, 2 + len(order))
    digest = hashlib.sha256("\n".join(dataset.words[n - 1] for n in order).encode()).hexdigest()[:16]
    return final[dataset.x], {"size": 2 + len(order), "words": len(order), "padding": PADDING, "unknown": UNKNOWN,
                              "tokens": dataset.x.shape[1], "hash": digest}
