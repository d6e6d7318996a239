"""A plugin for pytest: kernels are compiled for a GPU, and not launched.

    COMPILE_KERNELS_FOR=80,90 python -m pytest -p kernels_compiled -m 'gpu or not gpu' tests/kernels …

The interpreter takes what no compiler does: types that do not fit, values that are not known in time, more shared memory than there is.
So every launch of the kernels' tests, at its true sizes, is compiled down to machine code for these compute capabilities; Triton brings
what that takes, and no GPU is needed. Tensors then hold whatever lay in memory, so nothing else that a test finds wrong counts here.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

ROOM = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}          # bytes of shared memory that a program may have
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32",
         torch.uint8: "u8", torch.bool: "i1"}
OPTIONS = ("num_warps", "num_stages")


class DoesNotCompileError(Exception):
    """What this is about."""


class _Compiled:
    """What was compiled, each once."""

    def __init__(self) -> None:
        self.targets = [int(t) for t in os.environ["COMPILE_KERNELS_FOR"].split(",")]
        self.seen: set[Any] = set()
        self.names: set[str] = set()

    def launch(self, kernel: Any, *args: Any, grid: Any = (), warmup: bool = False, **named: Any) -> None:
        try:
            self.take(kernel, args, named)
        except DoesNotCompileError:
            raise
        except Exception as error:              # a fault of this plugin must not pass for one that tests find
            raise DoesNotCompileError(f"{kernel.__name__} was not compiled: {error!r}") from error

    def take(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile what is launched, unless it was."""
        given = dict(zip(kernel.arg_names, args)) | {k: v for k, v in named.items() if k not in OPTIONS}
        signature, known, facts = {}, {}, {}
        for place, param in enumerate(kernel.params):
            value = given[param.name]
            signature[param.name] = kind = self.kind(value, param.is_constexpr)
            if kind == "constexpr":
                known[param.name] = value
            elif kind.startswith("*") or (kind[0] in "iu" and value % 16 == 0):
                facts[place,] = [["tt.divisibility", 16]]
        options = {k: v for k, v in named.items() if k in OPTIONS}
        what = kernel.__name__, str(signature), str(known), str(facts), str(options)
        if what not in self.seen:
            self.seen.add(what)
            self.names.add(kernel.fn.__module__ + "." + kernel.__name__)
            for target in self.targets:
                self.compile(kernel, signature, known, facts, options, target)

    @staticmethod
    def kind(value: Any, constant: bool) -> str:
        """The type a kernel's argument has for the compiler. A 1 is known to it, as it is when kernels are launched."""
        if constant or value is None or (type(value) is int and value == 1):
            return "constexpr"
        if isinstance(value, torch.Tensor):
            return "*" + TYPES[value.dtype]
        if isinstance(value, bool):
            return "i1"
        if isinstance(value, int):
            return "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
        return "fp32"

    @staticmethod
    def compile(kernel: Any, signature: Any, known: Any, facts: Any, options: Any, target: int) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        text = f"{kernel.fn.__module__}.{kernel.__name__} for sm_{target} with {known}, {options}"
        try:
            made = triton.compile(ASTSource(kernel, signature, known, facts), target=GPUTarget("cuda", target, 32), options=options)
        except Exception as error:
            raise DoesNotCompileError(f"{text}: {error}") from error
        if made.metadata.shared > ROOM[target]:
            raise DoesNotCompileError(f"{text}: {made.metadata.shared} bytes of shared memory, there are {ROOM[target]}")


def pytest_configure(config: pytest.Config) -> None:
    from triton.runtime.jit import JITFunction
    compiled = config._compiled = _Compiled()                                                    # type: ignore[attr-defined]
    JITFunction.run = lambda self, *args, **named: compiled.launch(self, *args, **named)
    torch.testing.assert_close = lambda *given, **how: None                # a comparison before the way back must not end a test


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    try:
        return (yield)
    except (DoesNotCompileError, pytest.skip.Exception):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        for cause in (error.__cause__, error.__context__):                 # as when autograd or `raises` passed it on
            if isinstance(cause, DoesNotCompileError):
                raise cause from error
        return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes of pytest-xdist tell what they compiled. All together have compiled something, or the launches went another way."""
    compiled: _Compiled = session.config._compiled                                               # type: ignore[attr-defined]
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["kernels"] = sorted(compiled.names), sorted(map(repr, compiled.seen))
    elif not compiled.names and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    names, seen = getattr(node, "workeroutput", {}).get("kernels", ((), ()))
    node.config._compiled.names.update(names)
    node.config._compiled.seen.update(seen)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    compiled: _Compiled = config._compiled                                                       # type: ignore[attr-defined]
    terminalreporter.write_line(f"{len(compiled.seen)} variants of {len(compiled.names)} kernels compiled for "
                                f"{', '.join(f'sm_{t}' for t in compiled.targets)}")
