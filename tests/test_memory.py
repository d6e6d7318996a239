"""Tensors mapped from files."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
import torch

from consilience import memory


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_a_mapped_file_is_its_contents(tmp_path, dtype):
    values = torch.arange(60).to(dtype).reshape(5, 3, 4)
    np.save(tmp_path / "x.npy", values.numpy())
    offset = (tmp_path / "x.npy").stat().st_size - values.numel() * dtype.itemsize
    x = memory.map_file(tmp_path / "x.npy", dtype, (5, 3, 4), offset)
    assert torch.equal(x, values)
    assert memory.file_of(x) == memory.file_of(x[1:, 0]) == str(tmp_path / "x.npy")
    assert memory.file_of(values) is None
    assert x.to("cpu").data_ptr() == x.data_ptr()                    # not copied on its way to the device
    memory.let_go([x, values])
    assert torch.equal(x.index_select(0, torch.tensor([4, 0])), values[[4, 0]])
    address = x.untyped_storage().data_ptr()
    del x
    gc.collect()
    assert address not in memory._FILES


def test_nothing_is_mapped_as_nothing(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert memory.map_file(tmp_path / "empty", torch.float32, (0, 3)).shape == (0, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name can be reached on Linux alone")
def test_what_is_spilled_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    values = torch.arange(1000)
    out = memory.spill(values)
    assert torch.equal(out, values)
    assert out.data_ptr() != values.data_ptr()
    assert os.path.isfile(memory.file_of(out))                       # other processes can open it
    again = memory.map_file(memory.file_of(out), torch.int64, (1000,))
    assert torch.equal(again, values)
    assert not list(tmp_path.iterdir())
    path = memory.file_of(out)
    del out
    gc.collect()
    assert not os.path.isfile(path)
