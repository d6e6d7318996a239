"""The plugin that compiles kernels: what it cannot take is told, and so is that nothing was compiled. Without Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels_compiled
from kernels_compiled import DoesNotCompileError, _Compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> _Compiled:
    monkeypatch.setenv("COMPILE_KERNELS_FOR", "80,90")
    return _Compiled()


def kernel(*names: str) -> Any:
    return SimpleNamespace(arg_names=list(names), params=[SimpleNamespace(name=n, is_constexpr=n.isupper()) for n in names],
                           __name__="double", fn=SimpleNamespace(__module__="made"))


def test_each_variant_is_compiled_once_for_each_target(compiled: _Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides of 16 and of 32 are alike to the compiler, 5 is not, and 1 is known to it."""
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compiled, "compile", lambda kernel, signature, known, facts, options, target: done.append(
        (signature["stride"], known, sorted(facts), target)))
    for stride in (16, 32, 5, 1):
        compiled.launch(kernel("x", "stride", "BLOCK"), torch.zeros(2), stride, BLOCK=64, grid=(1,), num_warps=4)
    assert done == [("i32", {"BLOCK": 64}, [(0,), (1,)], 80), ("i32", {"BLOCK": 64}, [(0,), (1,)], 90),
                    ("i32", {"BLOCK": 64}, [(0,)], 80), ("i32", {"BLOCK": 64}, [(0,)], 90),
                    ("constexpr", {"BLOCK": 64, "stride": 1}, [(0,)], 80), ("constexpr", {"BLOCK": 64, "stride": 1}, [(0,)], 90)]
    assert compiled.names == {"made.double"}


@pytest.mark.parametrize("given", [{"x": torch.zeros(2, dtype=torch.complex64)}, {}])
def test_what_the_plugin_does_not_understand_is_told(compiled: _Compiled, given: dict[str, Any]) -> None:
    """A type it has no name for, or an argument that is missing. Any other error would count as a test's own, and pass."""
    with pytest.raises(DoesNotCompileError, match="double was not compiled"):
        compiled.launch(kernel("x"), grid=(1,), **given)


def test_processes_tell_what_they_compiled(compiled: _Compiled) -> None:
    def session(config: Any) -> Any:
        return SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)
    own = SimpleNamespace(_compiled=SimpleNamespace(names={"made.double"}, seen={("double", "a"), ("double", "b")}), workeroutput={})
    kernels_compiled.pytest_sessionfinish(session(own))
    whole = session(SimpleNamespace(_compiled=compiled))
    kernels_compiled.pytest_sessionfinish(whole)
    assert whole.exitstatus == pytest.ExitCode.TESTS_FAILED             # nothing was compiled
    for _ in range(2):                                                  # two that compiled the same
        kernels_compiled.pytest_testnodedown(SimpleNamespace(config=whole.config, workeroutput=own.workeroutput))
    assert (compiled.names, len(compiled.seen)) == ({"made.double"}, 2)
    whole.exitstatus = pytest.ExitCode.OK
    kernels_compiled.pytest_sessionfinish(whole)
    assert whole.exitstatus == pytest.ExitCode.OK
