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


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2500000000 bytes."),
     "2.5 GB were asked for at once"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate 2500000000 bytes."),
     "2.5 GB were asked for at once"),                                                      # on Windows
    (MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000000000,) and data type float64"), "7.28 TiB for an array"),
    (MemoryError(), "does not suffice: none is left. Use"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (TypeError("manual_seed(): Overflow when unpacking long long"), None)])
def test_what_is_told_where_memory_lacks(error, said):
    told = memory.no_room(error)
    assert told is None if said is None else said in told
