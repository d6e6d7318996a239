"""Folders of image files as one uint8 tensor. Needs Pillow (the extra 'images')."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder, by name. Hidden ones (a Mac leaves ._scan.png beside scan.png) are no images."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and not p.is_dir())


def subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def read_images(paths: Sequence[Path], size: int, *, grey: bool = False) -> Tensor:
    """(N, 3 or 1, size, size); images of another size are resized (bilinear, as torchvision's Resize of a pair)."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise DataError("Reading image files needs Pillow. Install it with: pip install 'consilience[images]'") from None
    if not paths:
        raise DataError("There are no image files to read.")

    def read(path: Path) -> np.ndarray:
        try:
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):           # converting would make every value above 255 white
                    raise DataError(f"The image {path} has more than 8 bits for each pixel (Pillow's mode {image.mode!r}), which would be "
                                    "cut off at 255. Save it with 8 bits, in the window that shows what matters, or bring the values as "
                                    "real numbers: arrays(path=\"….npz\").")
                if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
                    image.info.pop("transparency")              # it has no say in the colours, and Pillow warns of it in every process
                plain = image.convert("L" if grey else "RGB")
                if plain.size != (size, size):
                    plain = plain.resize((size, size), Image.Resampling.BILINEAR)
                return np.asarray(plain)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:     # Pillow's own kinds for damaged files
            raise DataError(f"The file {path} cannot be read as an image: {str(error).rstrip('.')}.") from None

    channels = 1 if grey else 3
    out = torch.empty((len(paths), channels, size, size), dtype=torch.uint8)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:       # Pillow lets other threads run while it decodes
        for start in range(0, len(paths), 4096):                        # few results wait in memory at a time
            for i, image in enumerate(pool.map(read, paths[start:start + 4096]), start):
                out[i] = torch.from_numpy(image.reshape(size, size, channels).transpose(2, 0, 1).copy())
    return out


def image_size(path: Path) -> tuple[int, int]:
    """Width and height."""
    try:
        from PIL import Image

        with Image.open(path) as image:
            return image.size
    except ModuleNotFoundError:
        raise DataError("Reading image files needs Pillow. Install it with: pip install 'consilience[images]'") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"The file {path} cannot be read as an image: {str(error).rstrip('.')}.") from None


def class_files(folder: Path, classes: Sequence[str],
                aliases: dict[str, tuple[str, ...]] | None = None) -> tuple[list[Path], list[int]]:
    """The images of the class folders of `folder` and their labels; a missing or empty class folder is an error."""
    paths, labels = [], []
    for label, name in enumerate(classes):
        names = (name, *(aliases or {}).get(name, ()))
        at = next((folder / n for n in names if (folder / n).is_dir()), None)
        if at is None:
            raise DataError(f"The folder {folder} lacks the class folder {name!r}. It must hold one folder for each of: "
                            f"{', '.join(classes)}.")
        files = image_files(at)
        if not files:
            raise DataError(f"The class folder {at} holds no image files ({', '.join(SUFFIXES)}).")
        paths += files
        labels += [label] * len(files)
    return paths, labels
