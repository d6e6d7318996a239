"""Where kernels of ours stand aside: the way back that a kernel computes has no gradient of its own, and functions may be transformed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ConfigError

_TWICE: ContextVar[bool] = ContextVar("twice", default=False)


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


def transformed() -> bool:
    """Whether torch.vmap, torch.func.grad or their like are at work: they know PyTorch's own operations, in its own layouts. The same
    holds where gradients are to be differentiated.
    """
    return _TWICE.get() or torch._C._functorch.maybe_current_level() is not None


def twice() -> bool:
    """Whether gradients are to be differentiated and that alone is asked: kernels that have second derivatives may be used."""
    return _TWICE.get() and torch._C._functorch.maybe_current_level() is None


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """For a pass whose gradients are to have gradients: of our kernels those alone, and attention in the one form, that have second
    derivatives.
    """
    before = _TWICE.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _TWICE.reset(before)
