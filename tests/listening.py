"""Ways to listen to a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _own_forward(layer: nn.Module, note: Callable[[], Any]) -> None:
    real = layer.forward

    def forward(*args: Any) -> Any:
        note()
        return real(*args)
    layer.forward = forward


LISTEN: dict[str, Callable[[nn.Module, Callable[[], Any]], Any]] = {
    "forward": lambda layer, note: layer.register_forward_hook(lambda *_: note()),
    "forward_pre": lambda layer, note: layer.register_forward_pre_hook(lambda *_: note()),
    "backward": lambda layer, note: layer.register_full_backward_hook(lambda *_: note()),
    "backward_pre": lambda layer, note: layer.register_full_backward_pre_hook(lambda *_: note()),
    "own forward": _own_forward,
}
