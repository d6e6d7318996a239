"""Parts and models in files of the user's own: their versions, their mistakes, and where they run."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest

TINY = ("--data", "synthetic(samples=160, classes=3, clients=4, features=6)", "--rounds", "2", "--lr", "0.1")
PART = '''
from dataclasses import dataclass
from typing import Any
from consilience import Part, option, tree
import torch

@dataclass(frozen=True)
class Mine(Part):
    """An idea."""
    strength: float = option(0.1, "how much", low=0.0)
    name = "mine"

    def loss(self, v: Any) -> Any:
        return LOSS
'''
PULL = "self.strength * tree.sq_dist(tree.pick(v.params, v.travelling), v.received['params'])"
NET = '''
from torch import nn

class Net(nn.Module):
    def __init__(self, sample, classes, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(sample[0], width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.body(x))
'''


def write(path, loss: str) -> None:
    path.write_text(PART.replace("LOSS", loss))


def loss_of(document) -> float:
    return document["records"][-1]["loss"]


def test_an_edited_part_is_another_run(cli, tmp_path):
    """The old numbers must never stand in for those of the new code."""
    write(tmp_path / "mine.py", PULL)
    first = cli("run", "./mine.py:Mine", *TINY, "--json").json()
    assert cli("run", "./mine.py:Mine", *TINY, "--json").json()["measured"]["folder"] == first["measured"]["folder"]
    write(tmp_path / "mine.py", "10 * " + PULL)
    second = cli("run", "./mine.py:Mine", *TINY, "--json").json()
    assert second["measured"]["folder"] != first["measured"]["folder"]
    assert loss_of(second) != loss_of(first)
    assert all(not p.name.startswith(".") for p in (tmp_path / "runs").iterdir())


def test_a_folder_of_the_old_version_is_refused_until_it_is_back(cli, tmp_path):
    write(tmp_path / "mine.py", PULL)
    cli("run", "./mine.py:Mine", *TINY, "--out", "a")
    write(tmp_path / "mine.py", "10 * " + PULL)
    for command in (("run", "./mine.py:Mine", *TINY, "--out", "a"), ("resume", "a"), ("measure", "a", "accuracy"), ("export", "a")):
        said = cli(*command, code=2).err
        assert "was made with another version of" in said
        assert "a copy of the old one is 'a/code/mine.py'" in said
    shutil.copy(tmp_path / "a" / "code" / "mine.py", tmp_path / "mine.py")
    cli("resume", "a")
    write(tmp_path / "mine.py", "10 * " + PULL)
    cli("run", "./mine.py:Mine", *TINY, "--out", "a", "--again")
    assert "10 * " in (tmp_path / "a" / "code" / "mine.py").read_text()


def test_compare_runs_an_edited_part_anew_and_only_reads_the_rest(cli, tmp_path):
    write(tmp_path / "mine.py", PULL)
    compare = ("compare", "fedavg", "./mine.py:Mine", *TINY, "--no-local", "--seeds", "1", "--jobs", "1", "--out", "c", "--json")
    before = cli(*compare).json()
    write(tmp_path / "mine.py", "10 * " + PULL)
    cli(*compare)
    assert len([p for p in (tmp_path / "c").iterdir() if p.is_dir()]) == 3          # fedavg, and the part twice
    assert before["methods"]


def test_a_comparison_that_cannot_be_written_is_printed_before_the_error(cli, tmp_path):
    """As on a disk that is read-only by now: the runs are there, their table is printed, and the exit code is the disk's."""
    compare = ("compare", "fedavg", "fedprox", *TINY, "--no-local", "--seeds", "1", "--jobs", "1", "--out", "c")
    table = cli(*compare).out
    (tmp_path / "c" / "comparison.json").unlink()
    (tmp_path / "c" / "comparison.json").mkdir()
    refused = cli(*compare, code=4)
    assert refused.out == table
    assert "fedprox" in table
    assert "Cannot write 'c/comparison.json'" in refused.err
    assert [row["name"] for row in cli(*compare, "--json", code=4).json()["rows"]] == ["fedavg", "fedprox"]


def test_an_edited_model_is_another_run(cli, tmp_path):
    (tmp_path / "mynet.py").write_text(NET)
    run = ("run", "fedavg", *TINY, "--model", "./mynet.py:Net(width=4)", "--taps", "head=head", "--json")
    first = cli(*run).json()
    (tmp_path / "mynet.py").write_text(NET.replace("nn.ReLU()", "nn.Tanh()"))
    assert loss_of(cli(*run).json()) != loss_of(first)
    assert json.loads((tmp_path / first["measured"]["folder"] / "config.json").read_text())["code"].keys() == {"model"}


def test_code_from_files_runs_in_workers(cli, tmp_path):
    write(tmp_path / "mine.py", PULL)
    (tmp_path / "mynet.py").write_text(NET)
    how = ("run", "scaffold+./mine.py:Mine(strength=0.5)", *TINY, "--model", "./mynet.py:Net", "--taps", "head=head", "--json")
    alone = cli(*how, "--engine", "sequential").json()
    assert loss_of(cli(*how, "--engine", "workers").json()) == loss_of(alone)


@pytest.mark.parametrize(("loss", "said"), [
    ("v.nothere", "AttributeError: 'StepView' object has no attribute 'nothere' mine.py, line 14, in loss: return v.nothere"),
    ("torch.zeros(3)", "'loss' of part 'mine' must return one number: a tensor without dimensions, or a float. Got a tensor of shape (3,)"),
    ("None", "Got NoneType instead. Is a return missing?"),
])
def test_a_mistake_in_a_hook_names_its_line_and_does_not_block_the_folder(cli, tmp_path, loss, said):
    write(tmp_path / "mine.py", loss)
    assert said in cli("run", "./mine.py:Mine", *TINY, "--out", "a", code=2).err
    write(tmp_path / "mine.py", PULL)
    cli("run", "./mine.py:Mine", *TINY, "--out", "a")


def test_a_mistake_in_a_worker_process_names_its_line_too(cli, tmp_path):
    """In a hook after the steps: a first step is tried in the main process."""
    (tmp_path / "mine.py").write_text(PART.replace("LOSS", PULL) + "\n    def finish(self, c):\n        return c.nothere, {}\n")
    said = cli("run", "./mine.py:Mine", *TINY, "--engine", "workers", "--out", "a", code=2).err
    assert "AttributeError: 'ClientView' object has no attribute 'nothere' mine.py, line 17, in finish: return c.nothere, {}" in said


def test_a_comparison_names_the_line_too(cli, tmp_path):
    write(tmp_path / "mine.py", "v.nothere")
    said = cli("compare", "./mine.py:Mine", *TINY, "--no-local", "--seeds", "1", "--jobs", "1", code=3).err
    assert "mine.py, line 14, in loss: return v.nothere" in said


def test_a_model_file_that_is_not_there_or_does_not_load(cli, tmp_path):
    assert "There is no file './no.py'" in cli("run", "fedavg", *TINY, "--model", "./no.py:Net", code=2).err
    (tmp_path / "bad.py").write_text("x = 1\ny = x / 0\n")
    for model in ("./bad.py:Net", "bad:Net"):
        assert "bad.py, line 2" in cli("run", "fedavg", *TINY, "--model", model, code=2).err


def test_our_own_errors_keep_their_traceback(cli, monkeypatch):
    """A fault of ours must not be passed off as the user's."""
    from consilience.cli import train
    monkeypatch.setattr(train, "run_config", None)
    with pytest.raises(TypeError, match="not callable"):
        cli("run", "fedavg", *TINY)


def test_a_run_that_never_got_to_a_round_is_replaced(cli, tmp_path):
    """Too large a learning rate stops in round one; the same folder takes the next try."""
    cli("run", "fedavg", *TINY[:-1], "1e30", "--out", "a", code=3)
    cli("run", "fedavg", *TINY, "--out", "a")


@pytest.mark.parametrize("name", ["class", "random", "torch"])
def test_a_new_part_cannot_have_a_name_that_python_knows(cli, tmp_path, name):
    assert "means something to Python" in cli("new", "part", name, code=2).err
    assert not list(tmp_path.iterdir())


def test_a_comparison_does_not_show_old_numbers_for_changed_data(cli, tmp_path):
    draw = np.random.default_rng(0)
    y, client = draw.integers(0, 3, 60), np.repeat([0, 1, 2], 20)
    compare = ("compare", "fedavg", "--data", "arrays(path='mine.npz')", "--rounds", "1", "--no-local", "--seeds", "1", "--jobs", "1",
               "--out", "c")
    np.savez(tmp_path / "mine.npz", x=draw.normal(size=(60, 5)).astype(np.float32), y=y, client=client)
    cli(*compare)
    later = time.time() + 60
    os.utime(tmp_path / "mine.npz", (later, later))
    cli(*compare)                                       # touched, but the same
    np.savez(tmp_path / "mine.npz", x=draw.normal(size=(60, 5)).astype(np.float32), y=y, client=client)
    os.utime(tmp_path / "mine.npz", (later, later))
    assert "holds a run with fingerprint" in cli(*compare, code=3).err
    cli(*compare, "--again")
