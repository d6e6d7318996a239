"""Stochastic depth: drop a whole residual branch for some samples of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Multiply each sample's branch by 0 with probability p, else by 1/(1 − p); nothing in eval mode.

    `coin_dims` says how many leading dimensions have coins of their own (1: one coin per sample). When a method is
    assembled, layers with `p` and `coin_dims` are replaced by keyed ones, as nn.Dropout's are.
    """

    coin_dims = 1

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand((len(x), *[1] * (x.dim() - 1)), device=x.device) >= self.p
        return torch.where(keep, x / (1 - self.p), 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def can_be_keyed(layer: nn.Module) -> bool:
    """Whether the layer's coins can be drawn from a key instead of the global generator."""
    return type(layer) in DROPOUTS or (hasattr(layer, "coin_dims") and hasattr(layer, "p"))
