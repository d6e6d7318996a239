"""Data sets of the Hugging Face library, on disk or by name. Needs the extra 'huggingface'."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError, did_you_mean
from ...options import option
from ..dataset import Dataset
from ..text import TextDataset, number_words
from ._bring import find_path, from_arrays
from .base import Source


@dataclass(frozen=True)
class HuggingFace(Source):
    """A data set saved with `save_to_disk` (path), or one of the hub or its cache (dataset).

    The column `x` may hold images, numbers, lists of numbers or text (cut into words as ag_news is). A split named 'test' is
    the published test set.
    """

    path: str = option("", "a folder written by save_to_disk")
    dataset: str = option("", "a name on the hub; needs a connection, or the library's cache")
    config: str | None = option(None, "which configuration of a named data set")
    x: str = option("image", "the column with the samples")
    label: str = option("label", "the column with the class")
    client: str | None = option(None, "the column that says who owns a sample; becomes the group 'client'")
    size: int = option(0, "resize images to this many pixels; 0 keeps them", low=0)
    tokens: int = option(200, "words per text", low=1)

    name = "huggingface"
    title = "a data set of the Hugging Face library, on disk or by name"
    kind = "yours"
    needs_path = True
    default_split = ""
    how_to_get = "pip install 'consilience[huggingface]', then write huggingface(path=\"…\") or huggingface(dataset=\"…\")."

    def read(self, directory: str | Path | None = None) -> Dataset:
        if bool(self.path) == bool(self.dataset):
            raise ConfigError("Source 'huggingface' needs either path (a folder) or dataset (a name), as in "
                              'huggingface(path="…").')
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError("Source 'huggingface' needs the datasets package. Install it with: "
                            "pip install 'consilience[huggingface]'") from None
        try:
            held = (datasets.load_from_disk(str(find_path(self.path, self.name, directory))) if self.path
                    else datasets.load_dataset(self.dataset, self.config))
        except (DataError, ConfigError):
            raise
        except Exception as error:      # the library raises many kinds
            raise DataError(f"The Hugging Face data set {self.path or self.dataset!r} cannot be loaded: {error}") from None
        parts = dict(held) if isinstance(held, datasets.DatasetDict) else {"train": held}
        columns = next(iter(parts.values())).column_names
        for wanted in (self.x, self.label, *([self.client] if self.client else [])):
            if wanted not in columns:
                raise DataError(f"The data set {self.path or self.dataset!r} has no column {wanted!r}."
                                f"{did_you_mean(wanted, columns)}")
        chosen = {k: v for k, v in parts.items() if k in ("train", "test")} or parts
        values: list[Any] = [v for part in chosen.values() for v in part[self.x]]
        labels = [v for part in chosen.values() for v in part[self.label]]
        owners = [v for part in chosen.values() for v in part[self.client]] if self.client else None
        test = [k == "test" for k, part in chosen.items() for _ in range(len(part))]
        name = Path(self.path).name if self.path else self.dataset.split("/")[-1]
        feature = next(iter(parts.values())).features[self.label]
        names = tuple(getattr(feature, "names", None) or ())
        if values and isinstance(values[0], str):
            tokens, words = number_words(values, self.tokens)
            base = from_arrays(tokens, labels, owners, test=test, name=name, classes=len(names) or None, where=name)
            fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
            return TextDataset(**{**fields, "class_names": names or base.class_names}, words=words)
        base = from_arrays(self._stack(values), labels, owners, test=test, name=name, classes=len(names) or None, where=name)
        return dataclasses.replace(base, class_names=names or base.class_names)

    def _stack(self, values: list[Any]) -> np.ndarray:
        """Images or numbers as one array."""
        if values and hasattr(values[0], "convert"):        # a Pillow image
            mode = "L" if values[0].mode in ("L", "1", "I", "F") else "RGB"
            size = (self.size, self.size) if self.size else values[0].size
            pixels = np.stack([np.asarray(v.convert(mode) if v.size == size else v.convert(mode).resize(size)) for v in values])
            return pixels.reshape(*pixels.shape[:3], -1).transpose(0, 3, 1, 2)
        try:
            out = np.asarray(values)
            if out.dtype == object:
                raise ValueError("samples differ in shape")
            return out if out.ndim > 1 else out[:, None]
        except ValueError as error:
            raise DataError(f"Column {self.x!r} of {self.path or self.dataset!r} cannot be stacked into one array: "
                            f"{error}.") from None
