"""Settings that are written otherwise and mean the same are one run: nothing is trained twice for a blank."""

from __future__ import annotations

import json

import pytest

from consilience import RunConfig, run
from consilience.errors import ConfigError
from consilience.options import one_spelling
from consilience.runs.folder import read_records

ALIKE = [
    ("data", 'folder(path="photos", size=64)', "folder(path='photos',size=64)"),
    ("data", "table(path='w.csv', label=outcome)", "table(path='w.csv', label='outcome')"),
    ("split", "dirichlet(alpha=0.1)", " dirichlet( alpha=.10 )"),
    ("shift", "rotation(step=15)", "rotation(step = 15)"),
    ("transform", "crop+flip", "crop + flip()"),
    ("model", "resnet18(stem='3x3', norm='group')", 'resnet18(stem="3x3",norm=group)'),
    ("model", "./my + nets/a.py:Net(width=64)", "./my + nets/a.py:Net( width=64 )"),
    ("schedule", "step(every=30, gamma=0.1)", "step(every=30,gamma=.1)"),
]


@pytest.mark.parametrize(("name", "one", "other"), ALIKE)
def test_blanks_and_quotes_make_no_other_run(name: str, one: str, other: str) -> None:
    a, b = (RunConfig.make({name: text}).portable() for text in (one, other))
    assert a == b
    assert RunConfig.make({name: a[name]}).portable() == a             # what is stored is read as the same
    stored = json.loads(json.dumps({**a, name: one}))                  # as typed, by an earlier version
    assert RunConfig.make({name: other}).agrees(stored)


@pytest.mark.parametrize("text", ["photos/", "folder(path=", "mine(3)", "a b", "", "given"])
def test_what_cannot_be_read_stays_as_it_is(text: str) -> None:
    assert one_spelling(text) == text


def test_a_finished_run_is_read_under_another_spelling(tmp_path) -> None:
    how = {"clients": 3, "rounds": 1, "steps": 1, "out": tmp_path / "run"}
    run("fedavg", "digits", split="dirichlet(alpha=0.5, min_size=20)", **how)
    before = read_records(tmp_path / "run" / "records.jsonl")
    run("fedavg", "digits()", split="dirichlet(alpha=.5,min_size=20)", **how)
    assert read_records(tmp_path / "run" / "records.jsonl") == before   # times included
    with pytest.raises(ConfigError, match="split"):
        run("fedavg", "digits", split="dirichlet(alpha=0.6, min_size=20)", **how)


def test_a_folder_with_an_earlier_spelling_goes_on(tmp_path) -> None:
    how = {"clients": 3, "steps": 1, "split": "dirichlet(alpha=0.5, min_size=20)", "out": tmp_path / "run"}
    run("fedavg", "digits", rounds=1, **how)
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())
    stored["config"]["split"] = "dirichlet(alpha=0.5,min_size=20)"
    file.write_text(json.dumps(stored))
    assert len(run("fedavg", "digits", rounds=1, **how).records) == 1
