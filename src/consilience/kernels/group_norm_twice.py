"""ReLU and then GroupNorm where gradients are differentiated: the kernels of `group_norm`, and two for the way back of their way back.

PyTorch takes GroupNorm's second derivative apart into dozens of operations on whole maps in float32. Here a program again holds its groups
of one sample, and what each sample adds to the gradients of weight and bias is added up in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import group_norm
from .batch_norm import layout
from .group_norm import _geometry

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    from .group_norm import _entered, _gather, _of_group, _tile

    @triton.jit
    def _mean(values, n, GG: tl.constexpr, DD: tl.constexpr):
        """For each channel the mean over the n numbers of its group."""
        return (_of_group(tl.sum(values, 0), GG, DD) / n)[None, :]

    @triton.jit
    def _backward_twice(u, g, x, before, dg, dx, weight, means, stds, partials, C, G, third, SPREAD: tl.constexpr, BEFORE: tl.constexpr,
                        D: tl.constexpr, P: tl.constexpr, LAST: tl.constexpr, GG: tl.constexpr, DD: tl.constexpr, PP: tl.constexpr):
        """What arrives is u, the gradient of some L with respect to the way back's ∂x = ∂r·[x > 0].

        Over a group of N numbers, with s = 1/σ, h = γg, w = u·[x > 0], w′ = w − mean w and h′ = h − mean h, the way back is
        ∂r = s(h′ − r̂·mean(h·r̂)), and so L varies as Σw·∂r = N·s·(mean(w′h′) − a·b), where a = mean(w·r̂) and b = mean(h·r̂).

        To h it is linear: ∂L/∂h = s(w′ − a·r̂), whence ∂L/∂g = γ·∂L/∂h and ∂L/∂γ = Σg·∂L/∂h. On r depend s and r̂:
        ∂s = −s²·mean(r̂·∂r) and ∂r̂ = s(∂r − mean ∂r − r̂·mean(r̂·∂r)). The first gives −s²(mean(w′h′) − a·b)·r̂; the second, for
        −N·s·a·b has the slope −s(b·w + a·h) along r̂, gives −s²(b·w′ + a·h′ − 2a·b·r̂). Together, where x > 0 and else 0:
        ∂L/∂x = −s²(b·w′ + a·h′ + (mean(w′h′) − 3a·b)·r̂).
        """
        sample, group, c, here, place, mask = _tile(C, G, D, P, LAST, GG, DD, PP)
        value = _entered(x, before, place, mask, c, here, BEFORE)
        mean, std = tl.load(means + group)[None, :], tl.load(stds + group)[None, :]
        scale, n = tl.load(weight + c, mask=here, other=0.0)[None, :], D * P * 1.0
        unit = tl.where(mask, (tl.where(value < 0.0, 0.0, value) - mean) * std, 0.0)
        if SPREAD:                                  # one number for all positions of a channel
            grad = tl.where(mask, tl.load(g + sample * C + c, mask=here, other=0.0).to(tl.float32)[None, :], 0.0)
        else:
            grad = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
        w = tl.where(value > 0.0, tl.load(u + place, mask=mask, other=0.0).to(tl.float32), 0.0)
        w = tl.where(mask, w - _mean(w, n, GG, DD), 0.0)
        h = grad * scale
        h = tl.where(mask, h - _mean(h, n, GG, DD), 0.0)
        a, b, across = _mean(w * unit, n, GG, DD), _mean(h * unit, n, GG, DD), _mean(w * h, n, GG, DD)
        onto_h = std * (w - a * unit)
        tl.store(dg + place, (onto_h * scale).to(dg.dtype.element_ty), mask=mask)
        tl.store(partials + sample * C + c, tl.sum(grad * onto_h, 0), mask=here)
        out = tl.where(value > 0.0, -std * std * (b * w + a * h + (across - 3.0 * a * b) * unit), 0.0)
        out = out.to(dx.dtype.element_ty)
        tl.store(dx + place, out, mask=mask)
        if BEFORE:
            tl.store(partials + third + sample * C + c, tl.sum(out.to(tl.float32), 0), mask=here)


class _ReluNorm(group_norm._ReluNorm):
    """The same forward; its way back has one too."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_WayBack.apply(ctx, grads[0], *ctx.saved_tensors), *[None] * (len(ctx.needs_input_grad) - 4)


class _WayBack(torch.autograd.Function):
    """From the gradient of norm(relu(x + before)) to those of x, `before`, weight and bias. `node` is the forward's."""

    @staticmethod
    def forward(ctx: Any, node: Any, g: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, means: Tensor, stds: Tensor) -> Any:
        ctx.save_for_backward(g, x, before, weight, means, stds)
        ctx.groups, ctx.eps = node.groups, node.eps
        ctx.set_materialize_grads(False)
        return group_norm._ReluNorm.gradients(node, g)[:4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        g, x, before, weight, means, stds = ctx.saved_tensors
        u, *others = grads
        if u is None or any(o is not None for o in others) or torch.is_grad_enabled():
            dg, dx, dbefore, dweight = _in_tensors(grads, (g, x, before, weight), ctx.groups, ctx.eps)
        else:
            dg, dx, dbefore, dweight = _by_kernels(u, g, x, before, weight, means, stds, ctx.groups)
        return None, dg, dx, dbefore, dweight, None, None


def _by_kernels(u: Tensor, g: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, means: Tensor, stds: Tensor,
                groups: int) -> tuple[Tensor | None, ...]:
    b, c = x.shape[:2]
    u, spread = u.contiguous(memory_format=layout(x)), not any(g.stride()[2:])
    g = g[:, :, 0, 0].contiguous() if spread else g.contiguous(memory_format=layout(x))
    dg, dx = torch.empty_like(x, dtype=g.dtype), torch.empty_like(x)
    kinds = 1 if before is None else 2
    partials, sums = weight.new_empty(kinds, b, c), weight.new_empty(kinds, c)
    programs, sizes, how = _geometry(x, groups)
    with torch.cuda.device_of(x):
        _backward_twice[(programs,)](u, g, x, x if before is None else before, dg, dx, weight, means, stds, partials, *sizes, b * c,
                                     SPREAD=spread, BEFORE=before is not None, **how)
        _gather[(-(-c // 16), kinds)](partials, sums, sums, b, c, b * c, BB=64, CC=16)
    return dg, dx, None if before is None else sums[1].to(before.dtype), sums[0]


def _in_tensors(arrived: tuple[Tensor | None, ...], inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], groups: int,
                eps: float) -> list[Tensor | None]:
    """The same by PyTorch's operations, for what the slope of an input does not ask for: to differentiate gradients of weight and biases,
    or a third time. Others of the same numbers stand for the inputs, for g may depend on x by way of later layers.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(inputs[1].device.type, enabled=False):
        own = [t if t is None else t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        g, x, before, weight = own
        assert g is not None
        assert x is not None
        assert weight is not None
        bias = torch.zeros_like(weight).requires_grad_()
        entered = x if before is None else x + before[:, None, None]
        y = F.group_norm(F.relu(entered).float(), groups, weight, bias, eps)
        trained = [(t, v) for t, v in zip((x, before, weight, bias), arrived) if t is not None]
        back = torch.autograd.grad(y, [t for t, _ in trained], g.float(), create_graph=True)
        asked = [(out, v) for out, (_, v) in zip(back, trained) if v is not None]
        given = iter(torch.autograd.grad([out for out, _ in asked], [t for t in own if t is not None], [v for _, v in asked],
                                         create_graph=again, allow_unused=True))
        return [None if t is None else next(given) for t in own]


def relu_norm(norm: nn.GroupNorm, x: Tensor, before: Tensor | None = None) -> Tensor:
    """As that of `group_norm`, and where that is `usable`; its gradients can be differentiated."""
    x = x.contiguous(memory_format=layout(x))                 # not a copy within, of which nobody knows whence it came
    return _ReluNorm.apply(x, before, norm.weight, norm.bias, norm.num_groups, norm.eps)
