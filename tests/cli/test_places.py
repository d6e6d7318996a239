"""Folders with odd names, folders that are files, and forms of tables that do not exist."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

TINY = ("--data", "synthetic(samples=160, classes=3, clients=4, features=6)", "--rounds", "1", "--lr", "0.1")


def test_brackets_in_a_path_are_shown_and_close_nothing(cli, tmp_path):
    """Rich reads [x] as a style, and stops the program at a [/x] that closes none."""
    folder = "mit Leer [red]zeichen [/b] ö"
    assert f"Records and models: {folder}" in cli("run", "fedavg", *TINY, "--out", folder).out
    assert "wrote model [/i].safetensors" in cli("export", folder, "--out", "model [/i].safetensors").out


def test_warnings_show_brackets(capsys):
    from rich.console import Console

    from consilience.cli.output import warn
    from consilience.runs.progress import RunProgress, progress_bar
    warn("a [/b] c")
    with progress_bar() as bar:
        ear = RunProgress(bar, "x[/y]")
        ear.warned("d [/e] f")
        ear.noted("g [/h] i")
        bar.add_task("[/j]", note="[/k]")
    said = capsys.readouterr().err
    assert all(text in said for text in ("a [/b] c", "d [/e] f", "g [/h] i", "[/j]", "[/k]"))

    from consilience.report.tables import Table
    console = Console(width=80)
    with console.capture() as got:
        console.print(Table(["[/a]"], [["[-0.1, +0.2] [/x]"]], "t [/t]", ["n [/n]"]).rich(80))
    assert all(text in got.get() for text in ("[/a]", "[/x]", "[/t]", "[/n]"))


def test_a_name_between_colons_is_no_picture(cli, capsys):
    from consilience.runs.progress import progress_bar
    assert "Got 'lfd/table2:a:b:c' instead" in cli("reproduce", "lfd/table2:a:b:c", code=2).err
    with progress_bar() as bar:
        bar.console.print("accuracy, :smile: 50 %", markup=False)
    assert ":smile:" in capsys.readouterr().err


def test_a_table_on_a_narrow_terminal_loses_no_number():
    from rich.console import Console

    from consilience.report.tables import Table
    cells = ["AG News, practical", "FedAvg+DBE", "87.12", "27.51", "-59.61", "no", "1", "3 of 500 (scaled x0.006)"]
    table = Table(["column", "row", "paper", "ours", "difference", "within the paper's spread", "seeds", "rounds"], [cells])
    for width in (60, 80, 100, 200):
        console = Console(width=width)
        with console.capture() as got:
            console.print(table.rich(width))
        said = got.get()
        assert "…" not in said
        assert all(len(line) <= width for line in said.splitlines())
        if width > 60:                                            # there all words fit
            assert all(word in said for cell in cells for word in cell.split()), width


def test_a_split_and_its_picture_that_cannot_be_written(cli, tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "folder.svg").mkdir()
    assert "Cannot write 'folder.json': Is a directory" in cli("data", "show", "digits", "--save", "folder.json", code=4).err
    assert "Cannot write 'folder.svg': Is a directory" in cli("data", "show", "digits", "--out", "folder.svg", code=4).err


def test_a_part_that_cannot_be_written(cli, tmp_path):
    (tmp_path / "file").write_text("")
    assert "Cannot write 'file/mine.py'" in cli("new", "part", "mine", "--folder", "file", code=4).err


def test_a_path_that_the_system_refuses_is_named(cli, tmp_path, monkeypatch):
    """As a folder that may not be looked into. Who runs tests as root may look anywhere, so another refusal stands in for it."""
    (tmp_path / "photos").mkdir()
    monkeypatch.setattr(Path, "iterdir", partial(os.stat, "photos/refused"))
    assert cli("data", "check", "folder(path='photos')", code=4).err.startswith("Error: No such file or directory: 'photos/refused'.")
    monkeypatch.setenv("CONSILIENCE_TRACEBACK", "1")
    with pytest.raises(OSError, match="refused"):
        cli("data", "check", "folder(path='photos')")


def test_an_unknown_form_is_said_before_training(cli, tmp_path):
    assert "'markdown'" in cli("compare", "fedavg", *TINY, "--format", "markdwn", code=2).err
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_a_folder(cli, tmp_path):
    (tmp_path / "taken").write_text("mine")
    for command in (("run", "fedavg"), ("compare", "fedavg"), ("compare", "fedavg", "--tune", "1")):
        for folder in ("taken", "taken/below"):
            assert "'taken' is a file" in cli(*command, *TINY, "--out", folder, code=2).err
    assert (tmp_path / "taken").read_text() == "mine"
