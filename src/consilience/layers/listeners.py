"""When a layer must run by itself, by its own call: somebody listens to it, or has given it a forward of its own."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_ON_ALL = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)     # for every module


def heard(*layers: nn.Module) -> bool:
    """Whether a call of one of these layers would do more than the forward of its class."""
    return any(h._forward_hooks or h._forward_pre_hooks or h._backward_hooks or h._backward_pre_hooks or "forward" in h.__dict__
               for h in layers) or any(_ON_ALL)
