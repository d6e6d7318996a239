"""Which memory layout images and convolutions have where the run leaves it open."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..channels_last import turned
from .policy import Policy
from .population import Population

WIDE = 64               # input channels from which on cuDNN's kernels for channels side by side are the faster ones


def settle_layout(policy: Policy, module: nn.Module, population: Population, device: torch.device) -> Policy:
    """The policy with `layout=auto` replaced. On a GPU cuDNN turns contiguous maps around before and after each wide convolution,
    which is a third of a ResNet-18's step; narrow ones, and a CPU, do well with contiguous maps."""
    if policy.layout != "auto":
        return policy
    wide = any(isinstance(m, nn.Conv2d) and m.in_channels // m.groups >= WIDE for m in module.modules())
    last = device.type == "cuda" and wide and _accepts_turned(module, population, device)
    return replace(policy, layout="channels_last" if last else "contiguous")


def lay_out(x: Tensor, policy: Policy) -> Tensor:
    """Images in the run's layout; what has no maps stays as it is."""
    return turned(x) if policy.layout == "channels_last" and x.dim() == 4 else x


def _accepts_turned(module: nn.Module, population: Population, device: torch.device) -> bool:
    """Whether a model works on such maps. One that calls `view` on them does not."""
    x = population.glimpse(device)
    if x.dim() != 4:
        return False
    module = copy.deepcopy(module).to(device)
    try:
        module = module.to(memory_format=torch.channels_last)                       # type: ignore[call-overload]
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for training in (True, False):          # some have layers for training alone
                module.train(training)(turned(x))
    except Exception:               # what is wrong with it otherwise is told when the federation looks at it
        return False
    return True
