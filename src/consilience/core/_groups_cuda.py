"""ReLU and then GroupNorm as one CUDA kernel forward, and two backward; with the bias of the convolution before them, where there is one.

PyTorch launches five forward and seven backward, and two more for that bias, whose gradient it sums slowly: a fifth of a step of FedBR's
CNN. Here one program serves one group of one sample, whose numbers it holds at once. What each sample adds to the gradients of weight and
biases is kept, and added up by the second kernel in a fixed order.

Maps come in as float32 or bfloat16 and leave as float32: autocast gives GroupNorm float32, and so do we.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._norms_cuda import above, layout
from ._once import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LARGEST = 1 << 14           # numbers of a group that one program can hold

if triton is not None:
    @triton.jit
    def _tile(C, G, D: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        """Channels of the program's group, where its numbers lie, and which of the tile are there."""
        sample, group = tl.program_id(0) // G, tl.program_id(0) % G
        d, p = tl.arange(0, DD), tl.arange(0, PP)
        c = group * D + d
        if LAST:
            place = (sample * P + p)[:, None] * C + c[None, :]
        else:
            place = (sample * C + c)[None, :] * P + p[:, None]
        return sample, c, d < D, place, (p < P)[:, None] & (d < D)[None, :]

    @triton.jit
    def _entered(x, before, place, mask, c, here, BEFORE: tl.constexpr):
        """What enters the ReLU, rounded where PyTorch rounds it."""
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if BEFORE:
            value = tl.where(mask, value + tl.load(before + c, mask=here, other=0.0).to(tl.float32)[None, :], 0.0)
            value = value.to(x.dtype.element_ty).to(tl.float32)
        return value

    @triton.jit
    def _forward(x, before, y, weight, bias, means, stds, C, G, eps, BEFORE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                 LAST: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        _sample, c, here, place, mask = _tile(C, G, D, P, LAST, DD, PP)
        value = _entered(x, before, place, mask, c, here, BEFORE)
        value = tl.where(value < 0.0, 0.0, value)
        n = D * P * 1.0
        mean = tl.sum(tl.sum(value, 0), 0) / n
        apart = tl.where(mask, value - mean, 0.0)
        std = 1.0 / tl.sqrt(tl.sum(tl.sum(apart * apart, 0), 0) / n + eps)
        scale, shift = tl.load(weight + c, mask=here, other=0.0), tl.load(bias + c, mask=here, other=0.0)
        tl.store(y + place, apart * (std * scale)[None, :] + shift[None, :], mask=mask)
        tl.store(means + tl.program_id(0), mean)
        tl.store(stds + tl.program_id(0), std)

    @triton.jit
    def _backward(g, x, before, dx, weight, means, stds, partials, C, G, third, BEFORE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                  LAST: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        """With N numbers in a group, r = relu(x) and r̂ normalised: ∂r = (γg − (Σγg + r̂·Σγg·r̂)/N)/σ, and ∂x = ∂r where x > 0."""
        sample, c, here, place, mask = _tile(C, G, D, P, LAST, DD, PP)
        value = _entered(x, before, place, mask, c, here, BEFORE)
        grad = tl.load(g + place, mask=mask, other=0.0)
        mean, std = tl.load(means + tl.program_id(0)), tl.load(stds + tl.program_id(0))
        unit = tl.where(mask, (tl.where(value < 0.0, 0.0, value) - mean) * std, 0.0)
        plain, turned = tl.sum(grad, 0), tl.sum(grad * unit, 0)
        tl.store(partials + sample * C + c, plain, mask=here)
        tl.store(partials + third + sample * C + c, turned, mask=here)
        scale, n = tl.load(weight + c, mask=here, other=0.0), D * P * 1.0
        first, second = tl.sum(plain * scale, 0) / n, tl.sum(turned * scale, 0) / n
        out = tl.where(value > 0.0, std * (grad * scale[None, :] - first - unit * second), 0.0)
        out = out.to(dx.dtype.element_ty)
        tl.store(dx + place, out, mask=mask)
        if BEFORE:
            out = out.to(tl.float32)
            tl.store(partials + 2 * third + sample * C + c, tl.sum(out, 0), mask=here)

    @triton.jit
    def _gather(partials, sums, B, C, third, BB: tl.constexpr, CC: tl.constexpr):
        """Of bias, weight and the bias before: one row of programs each."""
        c, kind = tl.program_id(0) * CC + tl.arange(0, CC), tl.program_id(1)
        total = tl.zeros((CC,), tl.float32)
        for start in range(0, B, BB):
            b = start + tl.arange(0, BB)
            place, mask = b[:, None] * C + c[None, :], (b < B)[:, None] & (c < C)[None, :]
            total += tl.sum(tl.load(partials + kind * third + place, mask=mask, other=0.0), 0)
        tl.store(sums + kind * C + c, total, mask=c < C)


def usable(norm: nn.GroupNorm, x: Tensor) -> bool:
    """Whether the kernels compute what GroupNorm after a ReLU would: under autocast, where maps are bfloat16."""
    if triton is None or not x.is_cuda or torch.jit.is_tracing():
        return False
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 4 or x.numel() >= 1 << 31 or not len(x):
        return False
    if norm.weight is None or not (norm.weight.dtype == norm.bias.dtype == torch.float32) or x.shape[1] != norm.num_channels:
        return False
    positions = x.shape[2] * x.shape[3]
    return above(x.shape[1] // norm.num_groups) * above(positions) <= LARGEST


def _geometry(x: Tensor, groups: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    c, positions = x.shape[1], x.shape[2] * x.shape[3]
    d = c // groups
    tile = above(d), above(positions)
    return (c, groups), {"D": d, "P": positions, "LAST": layout(x) is torch.channels_last, "DD": tile[0], "PP": tile[1],
                         "num_warps": min(16, max(4, tile[0] * tile[1] // 512))}


class _ReluNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        x = x.contiguous(memory_format=layout(x))
        y = torch.empty_like(x, dtype=torch.float32)
        means, stds = weight.new_empty(len(x), groups), weight.new_empty(len(x), groups)
        sizes, how = _geometry(x, groups)
        with torch.cuda.device_of(x):
            _forward[(len(x) * groups,)](x, x if before is None else before, y, weight, bias, means, stds, *sizes, eps,
                                         BEFORE=before is not None, **how)
        ctx.save_for_backward(x, before, weight, means, stds)
        ctx.groups, ctx.eps = groups, eps
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReluNorm.gradients(ctx, *grads)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor) -> Any:
        x, before, weight, means, stds = ctx.saved_tensors
        b, c = x.shape[:2]
        g, dx = grads[0].contiguous(memory_format=layout(x)), torch.empty_like(x)
        kinds = 2 if before is None else 3
        partials, sums = weight.new_empty(kinds, b, c), weight.new_empty(kinds, c)
        sizes, how = _geometry(x, ctx.groups)
        with torch.cuda.device_of(x):
            _backward[(b * ctx.groups,)](g, x, x if before is None else before, dx, weight, means, stds, partials, *sizes, b * c,
                                         BEFORE=before is not None, **how)
            _gather[(-(-c // 16), kinds)](partials, sums, b, c, b * c, BB=64, CC=16)
        return dx, None if before is None else sums[2].to(before.dtype), sums[1], sums[0], None, None


def relu_norm(norm: nn.GroupNorm, x: Tensor, before: Tensor | None = None) -> Tensor:
    """norm(relu(x)), or norm(relu(x + before)) with a number for each channel, where `usable`."""
    return _ReluNorm.apply(x, before, norm.weight, norm.bias, norm.num_groups, norm.eps)
