"""When a layer must run by itself, by its own call: somebody listens to it, has given it a forward of its own, transforms functions, or
differentiates gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_TWICE: ContextVar[bool] = ContextVar("twice", default=False)
_ON_ALL = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)     # for every module


def heard(*layers: nn.Module) -> bool:
    """Whether a call of one of these layers would do more than the forward of its class."""
    return any(h._forward_hooks or h._forward_pre_hooks or h._backward_hooks or h._backward_pre_hooks or "forward" in h.__dict__
               for h in layers) or any(_ON_ALL)


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
