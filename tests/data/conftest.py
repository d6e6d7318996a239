"""A data directory, and a way to fill it with small files in a data set's true format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from data_files import WRITERS


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    return root


@pytest.fixture
def written(data_root: Path) -> Callable[[str], Path]:
    """Writes one data set and gives back the data directory."""

    def write(name: str) -> Path:
        WRITERS[name](data_root)
        return data_root

    return write
