"""Compact convolutional transformer, CCT-7/3×1 by default, as FedBR trains it on CIFAR-100."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..options import option
from .architecture import Need, Projected, shape_after
from .droppath import DropPath


class Tokens(nn.Module):
    """Maps to a row of tokens, with a learned position added to each."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(1, height * width, channels))
        nn.init.trunc_normal_(self.positions, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) + self.positions


class Attention(nn.Module):
    """Self-attention written out, because the fused one would draw its dropout from the global generator."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        weights = self.dropout((q @ k.transpose(-2, -1) * self.scale).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, width))


class Block(nn.Module):
    """Attention and a two-layer MLP, each beside a shortcut. The second norm replaces the stream (CCT's code)."""

    def __init__(self, width: int, heads: int, ratio: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width))
        self.drop1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.drop2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop1(self.attention(self.norm1(x))))
        return x + self.drop2(self.mlp(x))


class SequencePool(nn.Module):
    """A weighted mean of the tokens; the weights are a softmax of one learned score per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1).transpose(1, 2) @ x).squeeze(1)


@dataclass(frozen=True)
class Cct(Projected):
    """One 3×3 convolution makes the tokens; transformer blocks; sequence pooling; linear head.

    Linear layers start as truncated normal (0.02) with zero biases, the convolution as Kaiming normal. CCT-14/3×1 is
    cct(layers=14, width=384, heads=6, ratio=3).
    """

    layers: int = option(7, "transformer blocks", low=1)
    width: int = option(256, "width of a token", low=1)
    heads: int = option(4, "attention heads", low=1)
    ratio: int = option(2, "width of the MLP in widths of a token", low=1)
    dropout: float = option(0.1, "dropout of the attention weights", low=0, below=1)
    drop_path: float = option(0.1, "stochastic depth of the last block, growing from 0 in the first", low=0, below=1)

    name = "cct"
    example = ((3, 32, 32), 100)
    stages = ("tokenizer",)

    def body(self, need: Need) -> dict[str, nn.Module]:
        if self.width % self.heads:
            raise ConfigError(f"The 'width' option of model 'cct' must be a multiple of its {self.heads} heads. "
                              f"Got {self.width} instead.")
        w = self.width
        tokenizer = nn.Sequential(OrderedDict[str, nn.Module](
            conv=nn.Conv2d(need.sample[0], w, 3, 1, 1, bias=False), relu=nn.ReLU(), pool=nn.MaxPool2d(3, 2, 1)))
        tokens = Tokens(*shape_after({"tokenizer": tokenizer}, need, self.name))
        rates = [self.drop_path * i / max(self.layers - 1, 1) for i in range(self.layers)]
        blocks = {f"block{i}": Block(w, self.heads, self.ratio, self.dropout, rate) for i, rate in enumerate(rates, 1)}
        return {"tokenizer": tokenizer, "tokens": tokens, **blocks, "norm": nn.LayerNorm(w), "pool": SequencePool(w)}

    def initialise(self, module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
