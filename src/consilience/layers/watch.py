"""Who reads certain tensors during a pass: found by watching every operation that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """While it is entered, `found` becomes True when an operation is given one of these tensors, a view of one or what shares its memory.
    Sizes, types and places can be asked for; they are no operations.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = {t.untyped_storage().data_ptr() for t in tensors}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = kwargs or {}
        for given in (*args, *named.values()):
            for t in given if isinstance(given, (list, tuple)) else (given,):
                self.found = self.found or (isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._memory)
        return func(*args, **named)
