"""Small runs."""

from __future__ import annotations

from typing import Any

import pytest

import consilience

TINY: dict[str, Any] = {"data": "synthetic(samples=160, classes=3, clients=4, features=6)", "rounds": 3, "lr": 0.1, "validation": 0.2}


@pytest.fixture
def tiny() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder of a finished run on the small data set, made once for each method. Tests must not write to it."""
    folders: dict[str, Any] = {}

    def folder(method: str):
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp("run")
            consilience.run(method, out=folders[method], **TINY)
        return folders[method]
    return folder
