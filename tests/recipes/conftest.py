"""The small recipe as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_recipe import TINY


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path
