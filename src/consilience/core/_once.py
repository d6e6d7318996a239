"""Ways back that kernels compute, and that therefore have no gradient of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..errors import ConfigError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that refuses to be differentiated. PyTorch's `once_differentiable` does so only where the gradient that arrives
    has a graph; where it is the 1 that every way back starts from, it would answer with a constant, and a penalty be wrong unseen.
    """
    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():                   # in a way back that means create_graph=True
            raise ConfigError("The gradient of a gradient (create_graph=True) was asked for, as a gradient penalty does. Layers and losses "
                              "that a GPU computes in one kernel have none. Let the part declare `second_order`, or use device=cpu.")
        return backward(ctx, *grads)
    return refusing
