"""What a twin is built from, as a pickle: the one thing that cannot be said in JSON.

A module, parts and a transform may be objects of classes that only the user's program knows. They are pickled once for each
federation, as `multiprocessing` pickles what a spawned process starts with: from a process to the child that it started, which
runs the same program with the same rights (docs/decisions/0010-worker-wire.md). Tensors are not in the pickle.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..loading import LOADED, load_as

MAIN = "CONSILIENCE_MAIN"          # set for workers: the script of the process that started them


def dump(value: Any, place: Callable[[Tensor], int]) -> bytes:
    out = io.BytesIO()
    out.write(json.dumps(LOADED).encode() + b"\n")          # first, so that the classes in these files can be found
    _Pickler(out, place).dump(value)
    return out.getvalue()


def load(content: bytes, tensor: Callable[[int], Tensor]) -> Any:
    stream = io.BytesIO(content)
    for alias, path in json.loads(stream.readline()).items():
        load_as(alias, path)
    return _Unpickler(stream, tensor).load()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, place: Callable[[Tensor], int]) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.place = place

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return self.place(value), isinstance(value, nn.Parameter), value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, tensor: Callable[[int], Tensor]) -> None:
        super().__init__(content)
        self.tensor = tensor
        self._parameters: dict[int, nn.Parameter] = {}         # tied ones stay one

    def persistent_load(self, place: Any) -> Tensor:
        number, parameter, trains = place
        tensor = self.tensor(number)
        if not parameter:
            return tensor
        if number not in self._parameters:
            self._parameters[number] = nn.Parameter(tensor.clone(), requires_grad=trains)
        return self._parameters[number]

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            import_main()
        return super().find_class(module, name)


def import_main() -> None:
    """Bring in the classes of the user's script, which must not start training when it is imported."""
    path = os.environ.pop(MAIN, "")
    if path:
        found = runpy.run_path(path, run_name="__consilience_worker__")
        vars(sys.modules["__main__"]).update({k: v for k, v in found.items() if not k.startswith("__")})
