"""Samples that are mapped from files rather than held in memory; and many clients in a few tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from consilience import memory, rng
from consilience.core.population import RowTable
from consilience.data import cache, load, sources
from consilience.data.cache import FOLDER, read_mapped
from consilience.data.federated import ClientRows, ClientTable, FederatedData
from consilience.data.load import counts, cut
from consilience.data.sources.digits import Digits
from consilience.data.text import TextDataset
from consilience.errors import DataError


@pytest.fixture
def arrays(tmp_path):
    """The same arrays in an .npz file and in a folder of .npy files."""
    draw = np.random.default_rng(0)
    held = {"x": draw.integers(0, 256, (60, 1, 5, 5), dtype=np.uint8), "y": draw.integers(0, 3, 60), "client": np.arange(60) % 7,
            "test": np.arange(60) % 10 == 0}
    np.savez(tmp_path / "all.npz", **held)
    (tmp_path / "all").mkdir()
    for name, array in held.items():
        np.save(tmp_path / "all" / f"{name}.npy", array)
    return tmp_path


def test_a_folder_of_arrays_is_the_same_data_mapped(arrays):
    one, other = (load(f"arrays(path={str(arrays / name)!r})", validation=0.2, test="both") for name in ("all.npz", "all"))
    assert memory.file_of(one.x) is None
    assert memory.file_of(other.x) == str(arrays / "all" / "x.npy")
    assert memory.file_of(other.y)
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)
    assert one.split_hash() == other.split_hash()
    assert one.description["fingerprint"] == other.description["fingerprint"]


@pytest.mark.parametrize(("change", "said"), [
    (lambda at: np.save(at / "x.npy", np.zeros((60, 4), np.float64)), "must hold bytes, float32 or int64"),
    (lambda at: np.save(at / "x.npy", np.asfortranarray(np.zeros((60, 4), np.float32))), "Fortran"),
    (lambda at: (at / "x.npy").write_bytes(b"nothing"), "not a readable .npy file"),
    (lambda at: (at / "y.npy").unlink(), "must hold the arrays x and y"),
    (lambda at: np.save(at / "x.npy", np.full((60, 4), np.nan, np.float32)), "not finite"),
])
def test_what_cannot_be_mapped_is_refused(arrays, change, said):
    change(arrays / "all")
    with pytest.raises(DataError, match=said):
        load(f"arrays(path={str(arrays / 'all')!r})")


def test_any_source_can_be_mapped(tmp_path, monkeypatch):
    plain = load("digits", clients=5, seed=2)
    first = load("digits", clients=5, seed=2, data_dir=tmp_path, map_data=True)
    monkeypatch.setattr(Digits, "read", lambda *args: pytest.fail("it was read again"))
    second = load("digits", clients=5, seed=2, data_dir=tmp_path, map_data=True)
    for data in (first, second):
        assert memory.file_of(data.x).startswith(str(tmp_path / FOLDER))
        assert torch.equal(data.x, plain.x)
        assert data.description == plain.description
        assert data.split_hash() == plain.split_hash()


def test_other_files_are_mapped_anew(arrays):
    source = sources.make(f"arrays(path={str(arrays / 'all.npz')!r})")
    before = read_mapped(source, arrays)
    held = dict(np.load(arrays / "all.npz"))
    np.savez(arrays / "all.npz", **held | {"x": 255 - held["x"]})
    after = read_mapped(source, arrays)
    assert torch.equal(after.x, 255 - before.x)
    assert torch.equal(after.groups["client"], before.groups["client"])
    for folder in (arrays / FOLDER).iterdir():
        (folder / "about.json").write_text("{")
    with pytest.raises(DataError, match="Delete that folder"):
        read_mapped(source, arrays)


@pytest.mark.skipif(os.name == "nt", reason="nobody can be asked after there")
def test_drafts_of_killed_processes_are_removed_and_no_others(arrays):
    """A process that has ended, and two that nobody here can ask after: of those the one that was written to lately stays."""
    source = sources.make(f"arrays(path={str(arrays / 'all.npz')!r})")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = cache._here()
    days = {f"a.draft-{here}-{ended.pid}": 0, f"b.draft-{here}-{os.getppid()}": 5, "c.draft-0123456789ab-1": 0, "d.draft-0123456789ab-1": 2,
            "e.draft-77": 2, "f.draft-77": 0}
    for name, ago in days.items():
        (arrays / FOLDER / name).mkdir(parents=True)
        file = arrays / FOLDER / name / "x.npy"
        file.write_bytes(b"x")
        for path in (file, file.parent):
            os.utime(path, (time.time() - 86400 * ago,) * 2)
    data = read_mapped(source, arrays)
    left = {p.name for p in (arrays / FOLDER).iterdir()}
    assert left - {Path(memory.file_of(data.x)).parent.name} == {f"b.draft-{here}-{os.getppid()}", "c.draft-0123456789ab-1", "f.draft-77"}
    assert (arrays / FOLDER / "c.draft-0123456789ab-1" / "x.npy").is_file()


@pytest.mark.skipif(os.name == "nt", reason="nobody can be asked after there")
def test_a_process_that_was_killed_while_it_wrote_leaves_nothing_for_long(arrays):
    """Killed in the middle of its samples; the next one that writes takes the draft away."""
    name = f"arrays(path={str(arrays / 'all.npz')!r})"
    call = f"read_mapped(sources.make({name!r}), {str(arrays)!r})"
    kill = ("import os, signal; from consilience.data import cache, sources; from consilience.data.cache import read_mapped; "
            "cache._tensors = lambda d: (os.kill(os.getpid(), signal.SIGKILL), iter(()))[1]; ")
    assert subprocess.run([sys.executable, "-c", kill + call]).returncode == -signal.SIGKILL
    assert [".draft-" in p.name for p in (arrays / FOLDER).iterdir()] == [True]
    read_mapped(sources.make(name), arrays)
    assert [".draft-" in p.name for p in (arrays / FOLDER).iterdir()] == [False]


def test_text_is_not_mapped(tmp_path):
    """Words are numbered anew for every split."""
    data = TextDataset("t", torch.tensor([[1, 2], [2, 0], [1, 0], [2, 2]]), torch.tensor([0, 1, 0, 1]), 2, words=("red", "green"))
    source = Digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Digits, "read", lambda *args: data)
        assert read_mapped(source, tmp_path) is data
    assert not (tmp_path / FOLDER).exists()


# ---- tables ----------------------------------------------------------------------------------------------------------

def test_many_permutations_are_those_of_each_key():
    keys, sizes = rng.keys(3, "a", each=range(6)), torch.tensor([4, 0, 1, 7, 2, 5])
    expected = torch.cat([rng.permutation(rng.key(3, "a", i), n) for i, n in enumerate(sizes.tolist())])
    assert torch.equal(rng.permutations(keys, sizes), expected)


def test_parts_of_a_client():
    # ⌊0.6 · 7⌋ = 4 to train on, ⌊0.2 · 7⌋ = 1 to validate on, 2 left for the test; one sample is always there to train on
    assert [t.tolist() for t in counts(torch.tensor([7, 1, 0, 10]), 0.6, 0.2)] == [[4, 1, 0, 6], [1, 0, 0, 2]]
    # nothing is left for a test part: what rounding leaves is trained on
    assert [t.tolist() for t in counts(torch.tensor([7, 1]), None, 0.2)] == [[6, 1], [1, 0]]
    assert [p.tolist() for p in cut(torch.tensor([5, 3, 9, 1, 7, 2, 8]), 0.6, 0.2)] == [[1, 3, 5, 9], [7], [2, 8]]


def test_a_table_of_clients_is_a_sequence_of_clients():
    rows = lambda *numbers: torch.tensor(numbers, dtype=torch.int64)
    each = [ClientRows("b", rows(3, 1), rows(), rows(0)), ClientRows("a", rows(), rows(2), rows(5, 4)),
            ClientRows("c", rows(6), rows(), rows())]
    data = FederatedData("d", torch.zeros(7, 1), torch.zeros(7, dtype=torch.int64), 2, each)
    assert isinstance(data.clients, ClientTable)
    for got in (list(data.clients), data.clients[:], [data.clients[i - 3] for i in range(3)]):
        assert [(c.name, *(p.tolist() for p in c[1:])) for c in got] == [(c.name, *(p.tolist() for p in c[1:])) for c in each]
    assert [r.tolist() for r in data.table.everything()] == [[3, 1, 0], [2, 5, 4], [6]]
    assert [r.tolist() for r in data.table.train.sorted()] == [[1, 3], [], [6]]
    assert data.table.train.owner.tolist() == [0, 0, 2]
    with pytest.raises(IndexError):
        data.clients[3]


def test_rows_by_owner():
    table = RowTable.grouped(torch.tensor([7, 8, 9]), torch.tensor([1, 1, 3]), 5)
    assert [r.tolist() for r in table] == [[], [7, 8], [], [9], []]
