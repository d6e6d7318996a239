"""ReLU and then GroupNorm as one CUDA kernel forward, and two backward; with the bias of the convolution before them, where there is one.

PyTorch launches five forward and seven backward, and two more for that bias, whose gradient it sums slowly: a fifth of a step of FedBR's
CNN. Here one program serves one group of one sample, or several where less than what memory delivers at once would be theirs, and holds
all its numbers. What each sample adds to the gradients of weight and biases is kept, and added up by the second kernel in a fixed order.

Maps leave in the type they come in. Autocast makes those of GroupNorm float32; convolutions, which read most of them, would round them to
bfloat16 again, in kernels of their own. Where an average over positions follows, the gradient that arrives is one number for all of them
(`pooling`): it is read as such and never written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .batch_norm import above, layout
from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LARGEST = 1 << 14           # numbers of its groups that one program can hold
DELIVERED = 32              # bytes that memory delivers at once

if triton is not None:
    @triton.jit
    def _tile(C, G, D: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr, GG: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        """Of the program's groups: where each channel's statistics lie, its number, which are there; where numbers lie, which are there."""
        sample, first = tl.program_id(0) // (G // GG), tl.program_id(0) % (G // GG) * GG
        j, p = tl.arange(0, GG * DD), tl.arange(0, PP)
        group, d = first + j // DD, j % DD
        c = group * D + d
        if LAST:
            place = (sample * P + p)[:, None] * C + c[None, :]
        else:
            place = (sample * C + c)[None, :] * P + p[:, None]
        return sample, sample * G + group, c, d < D, place, (p < P)[:, None] & (d < D)[None, :]

    @triton.jit
    def _of_group(values, GG: tl.constexpr, DD: tl.constexpr):
        """For each channel the sum over its group."""
        sums = tl.sum(tl.reshape(values, (GG, DD)), 1)
        return tl.reshape(tl.broadcast_to(sums[:, None], (GG, DD)), (GG * DD,))

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
                 LAST: tl.constexpr, GG: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        _sample, group, c, here, place, mask = _tile(C, G, D, P, LAST, GG, DD, PP)
        value = _entered(x, before, place, mask, c, here, BEFORE)
        value = tl.where(value < 0.0, 0.0, value)
        n = D * P * 1.0
        mean = _of_group(tl.sum(value, 0), GG, DD) / n
        apart = tl.where(mask, value - mean[None, :], 0.0)
        std = 1.0 / tl.sqrt(_of_group(tl.sum(apart * apart, 0), GG, DD) / n + eps)
        scale, shift = tl.load(weight + c, mask=here, other=0.0), tl.load(bias + c, mask=here, other=0.0)
        out = apart * (std * scale)[None, :] + shift[None, :]
        tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
        tl.store(means + group, mean, mask=here & (c % D == 0))
        tl.store(stds + group, std, mask=here & (c % D == 0))

    @triton.jit
    def _backward(g, x, before, dx, weight, means, stds, partials, C, G, third, SPREAD: tl.constexpr, BEFORE: tl.constexpr,
                  D: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr, GG: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        """With N numbers in a group, r = relu(x) and r̂ normalised: ∂r = (γg − (Σγg + r̂·Σγg·r̂)/N)/σ, and ∂x = ∂r where x > 0."""
        sample, group, c, here, place, mask = _tile(C, G, D, P, LAST, GG, DD, PP)
        value = _entered(x, before, place, mask, c, here, BEFORE)
        if SPREAD:                                  # one number for all positions of a channel
            grad = tl.where(mask, tl.load(g + sample * C + c, mask=here, other=0.0).to(tl.float32)[None, :], 0.0)
        else:
            grad = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
        mean, std = tl.load(means + group), tl.load(stds + group)
        unit = tl.where(mask, (tl.where(value < 0.0, 0.0, value) - mean[None, :]) * std[None, :], 0.0)
        plain, turned = tl.sum(grad, 0), tl.sum(grad * unit, 0)
        tl.store(partials + sample * C + c, plain, mask=here)
        tl.store(partials + third + sample * C + c, turned, mask=here)
        scale, n = tl.load(weight + c, mask=here, other=0.0), D * P * 1.0
        first, second = _of_group(plain * scale, GG, DD) / n, _of_group(turned * scale, GG, DD) / n
        out = tl.where(value > 0.0, std[None, :] * (grad * scale[None, :] - first[None, :] - unit * second[None, :]), 0.0)
        out = out.to(dx.dtype.element_ty)
        tl.store(dx + place, out, mask=mask)
        if BEFORE:
            out = out.to(tl.float32)
            tl.store(partials + 2 * third + sample * C + c, tl.sum(out, 0), mask=here)

    @triton.jit
    def _gather(partials, sums, before, B, C, third, BB: tl.constexpr, CC: tl.constexpr):
        """Of bias, weight and the bias before, which may have another type: one row of programs each."""
        c, kind = tl.program_id(0) * CC + tl.arange(0, CC), tl.program_id(1)
        total = tl.zeros((CC,), tl.float32)
        for start in range(0, B, BB):
            b = start + tl.arange(0, BB)
            place, mask = b[:, None] * C + c[None, :], (b < B)[:, None] & (c < C)[None, :]
            total += tl.sum(tl.load(partials + kind * third + place, mask=mask, other=0.0), 0)
        if kind == 2:
            tl.store(before + c, total.to(before.dtype.element_ty), mask=c < C)
        else:
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


def _geometry(x: Tensor, groups: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """How many programs, how many channels and groups, and how they are divided among programs."""
    c, positions, last = x.shape[1], x.shape[2] * x.shape[3], layout(x) is torch.channels_last
    d = c // groups
    wide, high, beside = above(d), above(positions), 1
    while last and 2 * beside * d * x.element_size() <= DELIVERED and not groups % (2 * beside) and 2 * beside * wide * high <= LARGEST:
        beside *= 2
    return len(x) * groups // beside, (c, groups), {"D": d, "P": positions, "LAST": last, "GG": beside, "DD": wide, "PP": high,
                                                    "num_warps": min(16, max(4, beside * wide * high // 512))}


class _ReluNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        x = x.contiguous(memory_format=layout(x))
        y = torch.empty_like(x)
        means, stds = weight.new_empty(len(x), groups), weight.new_empty(len(x), groups)
        programs, sizes, how = _geometry(x, groups)
        with torch.cuda.device_of(x):
            _forward[(programs,)](x, x if before is None else before, y, weight, bias, means, stds, *sizes, eps,
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
        g, dx, spread = grads[0], torch.empty_like(x), not any(grads[0].stride()[2:])
        g = g[:, :, 0, 0].contiguous() if spread else g.contiguous(memory_format=layout(x))
        kinds = 2 if before is None else 3
        partials, sums = weight.new_empty(kinds, b, c), weight.new_empty(2, c)
        dbefore = None if before is None else torch.empty_like(before)
        programs, sizes, how = _geometry(x, ctx.groups)
        with torch.cuda.device_of(x):
            _backward[(programs,)](g, x, x if before is None else before, dx, weight, means, stds, partials, *sizes, b * c,
                                   SPREAD=spread, BEFORE=before is not None, **how)
            _gather[(-(-c // 16), kinds)](partials, sums, sums if dbefore is None else dbefore, b, c, b * c, BB=64, CC=16)
        return dx, dbefore, sums[1], sums[0], None, None


def relu_norm(norm: nn.GroupNorm, x: Tensor, before: Tensor | None = None) -> Tensor:
    """norm(relu(x)), or norm(relu(x + before)) with a number for each channel, where `usable`."""
    return _ReluNorm.apply(x, before, norm.weight, norm.bias, norm.num_groups, norm.eps)
