"""Your own images in folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import DataError
from ...options import option
from ..dataset import Dataset
from ._bring import PARTS, find_path
from ._images import SUFFIXES, class_files, image_files, image_size, read_images, subfolders
from .base import Source


@dataclass(frozen=True)
class Folder(Source):
    """Images in class folders (<class>/*.png), or in class folders of domains or clients (<domain>/<class>/*.png).

    Which of the two is seen from where the images lie. Class folders are sorted by name; every domain may lack classes.
    Domains become the group "domain". Folders named train and test at the top hold a published test set.
    """

    path: str = option("", "the folder")
    size: int = option(0, "resize to this many pixels; 0 takes the first image's size, if it is square", low=0)
    grey: bool = option(False, "one channel instead of three")

    name = "folder"
    title = "your images, in class folders or domain/class folders"
    needs_path = True
    default_split = ""
    how_to_get = 'write folder(path="…").'

    def read_samples(self, directory: str | Path | None = None) -> Dataset:
        root = self._root(directory)
        paths = image_files(root)
        if not paths:
            return self.read(directory)
        if other := next((p for p in subfolders(root) if image_files(p)), None):
            raise DataError(f"In {root} there are images beside the folder {other.name}/, which has some too. Images to be predicted lie "
                            "in one folder, or all of them in class folders.")
        return Dataset(name=root.name, x=read_images(paths, self._size(paths[0]), grey=self.grey), y=torch.full((len(paths),), -1),
                       classes=2, sample_names=tuple(p.name for p in paths))

    def read(self, directory: str | Path | None = None) -> Dataset:
        root = self._root(directory)
        tops = subfolders(root)
        if {"train", "test"} == {p.name for p in tops}:
            parts = {p.name: p for p in tops}
        else:
            _refuse_parts(root, tops)
            parts = {"": root}
        paths: list[Path] = []
        labels: list[str] = []
        domains: list[str] = []
        tests: list[bool] = []
        for part, at in parts.items():
            for domain, folder in _domains(at):
                classes = [c.name for c in subfolders(folder) if image_files(c)]
                if domain and not classes:
                    raise DataError(f"The folder {folder} holds no images in class folders ({', '.join(SUFFIXES)}), but others in {at} do. "
                                    "Put them there, or move the folder away: every folder beside it is a client.")
                files, of_class = class_files(folder, classes)
                paths += files
                labels += [classes[i] for i in of_class]
                domains += [domain] * len(files)
                tests += [part == "test"] * len(files)
        if not paths:
            raise DataError(f"The folder {root} holds no images in <class>/ or <domain>/<class>/ folders.")
        names = tuple(sorted(set(labels)))
        groups = tuple(sorted(set(domains)))
        grouped = groups != ("",)
        return Dataset(name=root.name, x=read_images(paths, self._size(paths[0]), grey=self.grey),
                       y=torch.tensor([names.index(v) for v in labels]), classes=max(len(names), 2), class_names=names,
                       official_test=torch.tensor(tests).nonzero().flatten(),
                       groups={"domain": torch.tensor([groups.index(v) for v in domains])} if grouped else {},
                       group_names={"domain": groups} if grouped else {},
                       sample_names=tuple(p.relative_to(root).as_posix() for p in paths))

    def _root(self, directory: str | Path | None) -> Path:
        root = find_path(self.path, self.name, directory)
        if not root.is_dir():
            raise DataError(f"Source 'folder': {root} is a file; a folder of class folders was expected.")
        return root

    def _size(self, first: Path) -> int:
        if self.size:
            return self.size
        width, height = image_size(first)
        if width != height:
            raise DataError(f"The image {first} has {width} × {height} pixels. Say which square size to use, as in "
                            f"folder(path=\"…\", size={min(width, height)}).")
        return width


def _refuse_parts(root: Path, tops: list[Path]) -> None:
    """A data set's own parts, which would be taken for clients."""
    found = [p for p in tops if p.name.lower() in PARTS]
    if not found or (len(found) == 1 and len(tops) > 1) or any(image_files(p) for p in tops):
        return
    if len(tops) == 1:
        raise DataError(f"The folder {root} holds {found[0].name}/ alone, which would be taken for a client and is called as a part of a "
                        f"data set. To read it, write folder(path=\"{found[0]}\").")
    move = next((f" Every client's validation samples are drawn from its own (validation=0.1), so move the images of {p.name}/ to one of "
                 "them." for p in found if PARTS[p.name.lower()] == "validation"), "")
    raise DataError(f"In {root}, {' and '.join(f'{p.name}/' for p in found)} would be taken for clients and are called as parts of a data "
                    f"set. The parts to train on and to test on are called train and test, with nothing beside them.{move}")


def _domains(folder: Path) -> list[tuple[str, Path]]:
    """(domain, its folder); one domain '' where the class folders hold the images themselves."""
    below = subfolders(folder)
    flat = [p for p in below if image_files(p)]
    if flat:
        deep = next((p for p in below if p not in flat and any(image_files(c) for c in subfolders(p))), None)
        if deep is not None:
            raise DataError(f"In {folder} the images lie in {flat[0].name}/ and also in folders of {deep.name}/. "
                            f"Use <class>/ folders or <domain>/<class>/ folders, not both.")
        return [("", folder)]
    return [(p.name, p) for p in below]
