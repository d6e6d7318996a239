"""Values as JSON with their tensors apart: what travels between processes in every round.

Reading makes numbers, words, containers, tensors and the two records below, and nothing else: whatever a message holds, no class
and no function of the sender's choice is called. A function can be named only towards a worker, which is told what to do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..blame import place_in_users_code, placed
from ..core.client import ClientState, Outcome
from ._plan import import_main

_RECORDS: dict[str, Any] = {"ClientState": ClientState, "Outcome": Outcome}
_SIMPLE = (type(None), bool, int, float, str)


def encode(value: Any, place: Callable[[Tensor], int]) -> Any:
    """A document for `json`; `place` takes a tensor and gives its number."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return {"tensor": place(value)}
    if type(value) is list:
        return [encode(v, place) for v in value]
    if type(value) is tuple:
        return {"tuple": [encode(v, place) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, place), encode(v, place)] for k, v in value.items()]}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
        return {"record": name, "fields": {n: encode(getattr(value, n), place) for n in names}}
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return {"function": [value.__module__, value.__qualname__]}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} cannot travel to or from a worker process. Tasks take and return "
                    "tensors, numbers, words, lists, tuples, dicts and clients' states and outcomes.")


def decode(document: Any, tensor: Callable[[int], Tensor], functions: bool = False) -> Any:
    """The value; `tensor` gives a tensor by its number. Only a reader that takes orders allows functions."""
    again = lambda d: decode(d, tensor, functions)
    if isinstance(document, list):
        return [again(d) for d in document]
    if not isinstance(document, dict):
        return document
    if "tensor" in document:
        return tensor(document["tensor"])
    if "tuple" in document:
        return tuple(again(d) for d in document["tuple"])
    if "dict" in document:
        return {again(k): again(v) for k, v in document["dict"]}
    if "record" in document:
        return _RECORDS[document["record"]](**{k: again(v) for k, v in document["fields"].items()})
    if functions and "function" in document:
        return _find(*document["function"])
    raise ValueError(f"A message between processes holds what is not allowed in it: {sorted(document)}.")


def _find(module: str, name: str) -> Any:
    if module == "__main__":
        import_main()
    found: Any = importlib.import_module(module)
    for step in name.split("."):
        found = getattr(found, step)
    return found


def describe_error(error: Exception) -> Any:
    """An exception as its class's name, its plain arguments and its place in code of the user's; None where they are not plain."""
    try:
        return [type(error).__module__, type(error).__qualname__, encode(list(error.args), _no_tensor), place_in_users_code(error)]
    except TypeError:
        return None


def rebuild_error(document: Any) -> Exception | None:
    """The exception, where its class is an exception's and known to this process already; else None."""
    if document is None:
        return None
    module, name, args, *place = document
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return None
    try:
        return placed(found(*decode(args, _no_tensor)), *place)
    except Exception:
        return None


def _no_tensor(_: Any) -> Any:
    raise TypeError("a tensor in an exception")
