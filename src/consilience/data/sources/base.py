"""What a source is: a name, the files it reads, how to get them, and how they become a `Dataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ... import options
from .. import directory as places
from ..dataset import Dataset


@dataclass(frozen=True)
class Wanted:
    """A file a source reads, relative to its folder; a path ending in '/' is a folder.

    `md5` lists every checksum known for the published file (packagers recompress). `also` lists other names the same
    file goes by. Files with `optional` may be absent.
    """

    path: str
    size: int | None = None
    md5: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    optional: bool = False

    def locate(self, folder: Path) -> Path | None:
        """Where the file lies in `folder`, under any of its names."""
        for name in (self.path, *self.also):
            at = folder / name
            if at.is_dir() if name.endswith("/") else at.is_file():
                return at
        return None


@dataclass(frozen=True)
class Download:
    """A file to fetch for people who are online. Archives (.tar.gz, .zip) are unpacked in the data directory."""

    url: str
    to: str                     # where it goes, relative to the data directory; an archive's members keep their paths below it
    md5: str = ""


class Source:
    """A data set. Subclasses are frozen dataclasses; their fields are the options that `name(key=value)` sets."""

    name: ClassVar[str]
    title: ClassVar[str]                                        # one line for tables
    kind: ClassVar[str] = "images"                              # images, text, signals, pairs, table, volumes
    folders: ClassVar[tuple[str, ...]] = ()                     # names its folder goes by in the data directory
    system_folders: ClassVar[tuple[str, ...]] = ()              # where operating systems install it
    files: ClassVar[tuple[Wanted, ...]] = ()
    downloads: ClassVar[tuple[Download, ...]] = ()
    how_to_get: ClassVar[str] = ""
    default_split: ClassVar[str] = "dirichlet(alpha=0.1)"          # "": by client or domain where the data has them
    default_clients: ClassVar[int] = 10                         # for splits that do not count them by themselves
    default_pool: ClassVar[str] = "train"                       # "all" where the published test set is other people's data
    default_test: ClassVar[str] = "clients"                     # "published" where every row has a part of its own
    default_transform: ClassVar[str | None] = None              # None: normalisation where the data set has a mean
    needs_path: ClassVar[bool] = False                          # what users bring: there is nothing to look for without a path
    named_features: ClassVar[bool] = False                      # whether the numbers of a sample have names, as the columns of a table

    def __post_init__(self) -> None:
        options.check(self, f"source {self.name!r}")

    @property
    def text(self) -> str:
        """The source as it can be typed, with the settings that differ from the defaults."""
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        return options.format_call(self.name, changed)

    @property
    def embedded(self) -> bool:
        """Whether nothing has to be on the disk."""
        return not (self.folders or self.needs_path)

    def for_clients(self, clients: int) -> Source:
        """The source when this many clients are asked for and no split is; only generated data can oblige."""
        return self

    def read(self, directory: str | Path | None = None) -> Dataset:
        """The data set, from the data directory (see `consilience.data.directory`)."""
        return self.read_folder(places.find(self, directory))

    def read_samples(self, directory: str | Path | None = None) -> Dataset:
        """As `read`, but where the samples have no labels these are −1: for predictions. Sources that always have labels just read."""
        return self.read(directory)

    def read_for(self, wanted: Collection[str], directory: str | Path | None = None, labelled: bool = True) -> Dataset:
        """As `read`, or as `read_samples` where samples need no labels, for whoever uses these features alone (none named: all).
        What else there is may then be in any form."""
        return self.read(directory) if labelled else self.read_samples(directory)

    def read_folder(self, folder: Path) -> Dataset:
        """The data set, from the folder that holds its files."""
        raise NotImplementedError

    def sources_of(self, folder: Path) -> list[tuple[Wanted, Path | None]]:
        """The declared files and where they lie."""
        return [(w, w.locate(folder)) for w in self.files]
