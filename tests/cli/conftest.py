"""The command line in this process: fast, and with what `main` makes of errors."""

from __future__ import annotations

import json
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
import typer.testing

from consilience.cli import main

# A process builds the tree of commands once and calls one of them; here one process calls hundreds.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Runs `consilience …` in an empty working directory; gives what it printed, and the JSON document if that is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: Any, code: int = 0) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["consilience", *map(str, arguments)])
        got = 0
        try:
            main()
        except SystemExit as stop:
            got = stop.code or 0
        out, err = capsys.readouterr()
        assert got == code, f"exit code {got} in place of {code}\n{out}\n{err}"
        assert "Traceback" not in err
        return SimpleNamespace(out=out, err=" ".join(err.split()), json=lambda: json.loads(out))
    return call
