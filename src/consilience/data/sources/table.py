"""Your own table, with a label column and a client column."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import DataError, did_you_mean, some
from ...options import option
from ..dataset import Dataset
from ._bring import PARTS, check_missing, find_path, from_arrays
from .base import Source

_LARGEST = float(np.finfo(np.float32).max)
_PARQUET = (".parquet", ".pq")
_LABEL = "label"


@dataclass(frozen=True)
class Table(Source):
    """A CSV file with a header, or a Parquet file: numbers as features, a label, and if there is one, a client.

    A folder of such files, all with the same columns, has one client for every file, named as the file. Labels and clients may be
    text. Parquet needs the extra 'tables'. Features are used as they are; the transform 'standardise' scales them.
    """

    path: str = option("", "the .csv or .parquet file, or a folder with one for every client")
    label: str = option(_LABEL, "the column with the class")
    client: str | None = option(None, "the column that says who owns the row; its values become the group 'client'")
    drop: tuple[str, ...] = option((), "columns that are not features")
    categories: tuple[str, ...] = option((), "columns of words or codes: each value becomes a feature of 0 and 1, named column=value")
    missing: str = option("refuse", "numbers that are missing: refuse them, or take the mean of the column over the client's other rows",
                          choices=("refuse", "mean"))
    separator: str = option(",", "what separates columns of a CSV file")
    decimal: str = option(".", "what stands before the decimals of a number in a CSV file", choices=(".", ","))

    name = "table"
    title = "your CSV or Parquet table, with a label and a client column"
    kind = "yours"
    needs_path = True
    named_features = True
    default_split = ""
    how_to_get = 'write table(path="….csv", label="…", client="…").'

    def read(self, directory: str | Path | None = None) -> Dataset:
        return self._dataset(directory, must_be_labelled=True)

    def read_samples(self, directory: str | Path | None = None) -> Dataset:
        return self._dataset(directory, must_be_labelled=False)

    def read_for(self, wanted: Collection[str], directory: str | Path | None = None, labelled: bool = True) -> Dataset:
        return self._dataset(directory, labelled, wanted)

    def _dataset(self, directory: str | Path | None, must_be_labelled: bool, wanted: Collection[str] = ()) -> Dataset:
        path = find_path(self.path, self.name, directory)
        files = _files(path)
        tables = [_parquet(file) if file.suffix.lower() in _PARQUET else _csv(file, self.separator) for file in files]
        labelled = must_be_labelled or self.label != _LABEL or _LABEL in tables[0]          # a label that is named must be there
        dropped = {c for c in self.drop if any(c in columns for columns in tables)}         # some sites' column alone, it may be
        for file, columns in zip(files, tables):
            self._check(file, columns.keys() | dropped, columns, labelled)
            if odd := sorted((columns.keys() ^ tables[0].keys()) - dropped):
                drop = repr(odd[0]) if len(odd) == 1 else f"({', '.join(odd)})"
                raise DataError(f"The tables {files[0]} and {file} must have the same columns, and only one of them has "
                                f"{', '.join(map(repr, odd))}. Rename it where it has another name, or leave it out with drop={drop}.")
        features = [c for c in tables[0] if c not in {self.label, self.client, *self.drop}]
        if not features:
            raise DataError(f"The table {files[0]} has no column left to be a feature.")
        # those that nobody wants may hold anything; sex=F and sex=M are wanted of sex
        features = [c for c in features if c in wanted or any(name.startswith(f"{c}=") for name in wanted)] or features
        owner: list[Any] | None = None
        if self.client:
            owner = [value for columns in tables for value in columns[self.client]]
        elif path.is_dir():
            owner = [file.stem for file, columns in zip(files, tables) for _ in columns[features[0]]]
        x, names = self._features(files, tables, features, owner)
        labels = _labels([value for columns in tables for value in columns[self.label]]) if labelled else np.zeros(len(x), np.int64)
        data = from_arrays(x, labels, owner, name=path.absolute().stem, where=str(path))
        return replace(data, feature_names=tuple(names), categories=self.categories, y=data.y if labelled else torch.full_like(data.y, -1))

    def _features(self, files: list[Path], tables: list[dict[str, Any]], columns: list[str],
                  owner: list[Any] | None) -> tuple[np.ndarray, list[str]]:
        """Numbers as they are and categories as 0 and 1, with their names."""
        parts: list[np.ndarray] = []
        names: list[str] = []
        for c in columns:
            if c in self.categories:
                words = [_word(v) for table in tables for v in table[c]]
                for file, table in zip(files, tables) if self.missing == "refuse" else ():
                    if (gone := next((i for i, v in enumerate(table[c]) if not _word(v)), None)) is not None:
                        raise DataError(f"Column {c!r} of {file} has no value in row {gone + 1} (got {table[c][gone]!r}). Fill it in, let "
                                        f"missing='mean' take it as none of the categories, or leave the column out with drop={c!r}.")
                known = sorted({w for w in words if w})
                parts += [np.asarray([w == value for w in words], np.float32) for value in known]
                names += [f"{c}={value}" for value in known]
            else:
                parts.append(np.concatenate([_numbers(table[c], c, file, self.missing == "mean", self.decimal)
                                             for file, table in zip(files, tables)]))
                names.append(c)
                if self.missing == "mean":
                    _fill(parts[-1], owner, c)
        if not parts:
            raise DataError(f"The table {files[0]} has no column left to be a feature: {some([repr(c) for c in columns])} has no value in "
                            "any row.")
        return np.stack(parts, 1), names

    def _check(self, file: Path, names: Collection[str], columns: dict[str, Any], labelled: bool) -> None:
        """`names` are the columns that may be asked for: the file's own, and what is dropped of other files."""
        for wanted in (*([self.label] if labelled else []), *([self.client] if self.client else []), *self.drop, *self.categories):
            if wanted not in (names if wanted in self.drop else columns):
                hint = (f" Say which column holds the class, as in label=outcome. There are: {some(list(columns))}."
                        if wanted == self.label == _LABEL else did_you_mean(wanted, columns))
                raise DataError(f"The table {file} has no column {wanted!r}.{_separated(columns) or hint}")
        if labelled:
            check_missing(np.asarray(columns[self.label]), "label", str(file))


def _files(path: Path) -> list[Path]:
    """The table itself, or those of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".csv", *_PARQUET) and not p.name.startswith("."))
    if not files:
        raise DataError(f"The folder {path} holds no .csv or .parquet files, of which each is a client's.")
    stems = [p.stem for p in files]
    if twice := next((p for p in files if stems.count(p.stem) > 1), None):
        raise DataError(f"The folder {path} has two files of the client {twice.stem!r}. Every client has one.")
    if len(files) > 1 and all(stem.lower() in PARTS for stem in stems):
        raise DataError(f"The tables {' and '.join(p.name for p in files)} of {path} would be taken for clients and are called as parts of "
                        "a data set. Put the rows of all of them in one table; train, validation and test divide each client's.")
    return files


# What a file that is no text begins with, what it then is, and what to do.
_OTHER_FORMS = {
    b"PK\x03\x04": "an Excel workbook or another archive. Save the sheet as CSV in UTF-8, or unpack the archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook. Save the sheet as CSV in UTF-8",
    b"\x1f\x8b": "compressed. Unpack it with: gunzip FILE",
    b"PAR1": "a Parquet file. Let its name end in .parquet",
    b"\xff\xfe": "text in UTF-16. Save it again as UTF-8, for example with: iconv -f utf-16 -t utf-8 OLD > NEW",
    b"\xfe\xff": "text in UTF-16. Save it again as UTF-8, for example with: iconv -f utf-16 -t utf-8 OLD > NEW"}


def _csv(path: Path, separator: str) -> dict[str, Any]:
    if len(separator) != 1:
        raise DataError(f"The separator of a table's columns is one character, as ';' or '\\t'. Got {separator!r} instead.")
    begins = 1
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
        if form := next((form for mark, form in _OTHER_FORMS.items() if start.startswith(mark)), None):
            raise DataError(f"The file {path} is not a CSV file in UTF-8 but {form}.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            # strict: a quotation mark that is left open would take the rows after it into its value
            rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=separator != " ")
            header = [h.strip() for h in next(rows, [])]
            columns: list[list[str]] = [[] for _ in header]
            begins = rows.line_num + 1
            for row in rows:
                begins = rows.line_num + 1
                if not row:
                    continue
                if len(row) != len(header):
                    hint = _separated(header) or (" A value goes over several lines: is a quotation mark before it not closed?"
                                                  if any("\n" in value for value in row) else "")
                    raise DataError(f"Line {rows.line_num} of {path} must have {len(header)} columns, as the header has. "
                                    f"Got {len(row)} instead.{hint}")
                for column, value in zip(columns, row):
                    column.append(value.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"The file {path} is not a CSV file in UTF-8: {error}. Save it again as UTF-8, for example with: "
                        f"iconv -f latin1 -t utf-8 OLD > NEW") from None
    except csv.Error as error:
        raise DataError(f"The row of {path} that begins in line {begins} is not CSV: {error}. Is a quotation mark not closed, or is there "
                        "more between it and the next separator? Within such a value a quotation mark is written twice.") from None
    except (TypeError, ValueError) as error:                 # Python has had all three for a separator it does not take
        raise DataError(f"The file {path} is not a CSV file in UTF-8: {error}.") from None
    except OSError as error:
        raise DataError(f"The file {path} cannot be read: {error.strerror or error}.") from None
    if not header or not columns[0]:
        raise DataError(f"The file {path} {'has a header and no rows' if header else 'is empty'}: a header and rows were expected.")
    for i, name in enumerate(header):
        if not name:
            raise DataError(f"Column {i + 1} of {path} has no name in the header (a row index that was saved along?). Delete the column, "
                            "or give it a name; drop=NAME then leaves it out.")
        if name in header[:i]:
            raise DataError(f"The header of {path} names two columns {name!r}. Give every column a name of its own.")
    return dict(zip(header, columns))


def _separated(columns: Collection[str]) -> str:
    """A hint where the whole header was read as one column."""
    only = next(iter(columns)) if len(columns) == 1 else ""
    found = next((mark for mark in (";", "\t", "|", ",") if mark in only), None)
    return f" Its header is {only!r}: are the columns separated by {found!r}? Then add separator={found!r}." if found else ""


def _parquet(path: Path) -> dict[str, Any]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError("Reading Parquet files needs pyarrow. Install it with: pip install 'consilience[tables]'") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:      # pyarrow has a kind of its own for every format error
        raise DataError(f"The file {path} is not a readable Parquet file: {error}.") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


_COMMA = re.compile(r"[-+]?\d+,\d+")
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?", ".")          # how tables write that there is no value


def _word(value: Any) -> str:
    """A category as text; nothing where it is missing."""
    text = "" if value is None or value != value else str(value).strip()
    return "" if text.lower() in _MISSING else text


def _fill(values: np.ndarray, owner: list[Any] | None, column: str) -> None:
    """The mean over a client's rows in place of what is missing among them: what a site can do by itself."""
    gone = np.isnan(values)
    whose = np.asarray([str(o) for o in owner]) if owner is not None else np.zeros(len(values), str)
    for name in np.unique(whose[gone]).tolist():
        mine = whose == name
        if gone[mine].all():
            raise DataError(f"Column {column!r} has no value in any row{f' of {name!r}' if name else ''}, so its mean is not known. "
                            f"Fill it in, or leave the column out with drop={column!r}.")
        values[mine & gone] = values[mine & ~gone].astype(np.float64).mean()


def _numbers(values: list[Any], column: str, path: Path, gaps: bool = False, decimal: str = ".") -> np.ndarray:
    out = np.empty(len(values), np.float32)
    # with a decimal comma a point would group thousands: 1.234 is not read as a little more than one
    as_python = str.maketrans({decimal: ".", ".": decimal})
    for i, value in enumerate(values):
        if gaps and not _word(value):
            out[i] = np.nan
            continue
        try:
            if "_" in str(value):                    # a code: Python takes 12_3 for 123
                raise ValueError
            number = float(value.translate(as_python) if isinstance(value, str) else value)
        except (TypeError, ValueError):
            number = float("nan")
        if not abs(number) <= _LARGEST:
            cure = ("Fill it, let missing='mean' take the mean" if not _word(value) else
                    "If that is a decimal comma, write decimal=','; or correct it" if decimal == "." and _COMMA.fullmatch(str(value)) else
                    f"If these are categories, write categories={column!r}; or correct it" if number != number else "Correct it")
            raise DataError(f"Column {column!r} of {path} must hold finite numbers (up to 3.4e38). Got {value!r} in row {i + 1}. {cure}, "
                            f"or leave the column out with drop={column!r}.")
        out[i] = number
    return out


def _labels(values: list[Any]) -> Any:
    """Whole numbers where all are, else text. 1.0 is the class 1: so it is written once a column had gaps."""
    try:
        return np.asarray([_whole(v) for v in values])
    except (TypeError, ValueError, OverflowError):
        return [str(v) for v in values]


def _whole(value: Any) -> int:
    if isinstance(value, str) and "_" in value:
        raise ValueError
    try:
        number = int(value)
    except ValueError:
        number = int(float(value))
    if float(value) != number:
        raise ValueError
    return number
