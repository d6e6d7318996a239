"""BatchNorm in training, with what follows it (a sum with another map, a ReLU), as one or two CUDA kernels each way.

PyTorch launches three to six forward and as many backward, the counter of batches included. Maps are float32 or bfloat16; statistics,
parameters and their gradients float32. A program owns some channels: where it can walk all of their positions it does everything, else
programs share the positions, leave partial sums, and a second kernel adds these in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ALONE = 1 << 16             # bytes of a map that one program walks by itself, twice: they stay in its cache
TILE, BACK_TILE = 1 << 14, 1 << 13      # numbers a program holds at once
SHARES = 64                 # programs that share the positions of a large map
MOST_PROGRAMS = (1 << 16) - 1           # that a launch can have along its second axis

if triton is not None:
    @triton.jit
    def _tile(start, c, M, C, P: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr):
        """Where the numbers of `ROWS` positions of channels c lie, and which of them are there. P, the positions of one sample, is known
        when this is compiled: every number is divided by it."""
        m = start + tl.arange(0, ROWS)
        if LAST:
            place = m[:, None] * C + c[None, :]
        else:
            place = ((m // P) * (C * P) + m % P)[:, None] + c[None, :] * P
        return place, (m < M)[:, None] & (c < C)[None, :]

    @triton.jit
    def _moments(x, first, end, c, M, C, P: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Mean, and sum of squared deviations from it, over positions first to end. Each place of the tile follows its own numbers
        (Welford's way); places meet once, at the end, so that the threads of a program do not wait for each other in between."""
        mean, spread = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        turn = 0.0
        for start in range(first, end, ROWS):
            place, mask = _tile(start, c, M, C, P, LAST, ROWS)
            value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
            turn += 1.0
            delta = tl.where(mask, value - mean, 0.0)
            mean += delta * (1.0 / turn)
            spread += delta * (value - mean)
        n = (tl.maximum(end - first - tl.arange(0, ROWS) + ROWS - 1, 0) // ROWS).to(tl.float32)[:, None]
        middle = tl.sum(mean * n, 0) / (end - first)
        apart = mean - middle[None, :]
        return middle, tl.sum(spread + apart * apart * n, 0)

    @triton.jit
    def _record(mean, spread, c, M, C, eps, momentum, means, stds, run_mean, run_var, batches, first):
        """The statistics that the backward pass needs, and the running ones as PyTorch moves them."""
        here = c < C
        tl.store(means + c, mean, mask=here)
        tl.store(stds + c, 1.0 / tl.sqrt(spread / M + eps), mask=here)
        tl.store(run_mean + c, (1.0 - momentum) * tl.load(run_mean + c, mask=here, other=0.0) + momentum * mean, mask=here)
        tl.store(run_var + c, (1.0 - momentum) * tl.load(run_var + c, mask=here, other=0.0) + momentum * (spread / (M - 1)), mask=here)
        if first:
            tl.store(batches, tl.load(batches) + 1)

    @triton.jit
    def _write(x, add, y, first, end, c, M, C, P: tl.constexpr, mean, scale, shift,
               ADD: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr):
        for start in range(first, end, ROWS):
            place, mask = _tile(start, c, M, C, P, LAST, ROWS)
            value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
            value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
            if ADD:
                value += tl.load(add + place, mask=mask, other=0.0).to(tl.float32)
            if RELU:
                value = tl.where(value < 0.0, 0.0, value)
            tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _forward(x, add, y, weight, bias, means, stds, run_mean, run_var, batches, M, C, P: tl.constexpr, eps, momentum,
                 ADD: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        c = tl.program_id(0) * COLS + tl.arange(0, COLS)
        mean, spread = _moments(x, 0, M, c, M, C, P, LAST, ROWS, COLS)
        scale = tl.load(weight + c, mask=c < C, other=0.0) * (1.0 / tl.sqrt(spread / M + eps))
        _write(x, add, y, 0, M, c, M, C, P, mean, scale, tl.load(bias + c, mask=c < C, other=0.0), ADD, RELU, LAST, ROWS)
        _record(mean, spread, c, M, C, eps, momentum, means, stds, run_mean, run_var, batches, tl.program_id(0) == 0)

    @triton.jit
    def _forward_partials(x, partials, M, C, P: tl.constexpr, EACH, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        c, s = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1)
        mean, spread = _moments(x, s * EACH, tl.minimum(M, s * EACH + EACH), c, M, C, P, LAST, ROWS, COLS)
        tl.store(partials + s * C + c, mean, mask=c < C)
        tl.store(partials + (tl.num_programs(1) + s) * C + c, spread, mask=c < C)

    @triton.jit
    def _forward_apply(x, add, y, partials, weight, bias, means, stds, run_mean, run_var, batches, M, C, P: tl.constexpr, EACH,
                       eps, momentum, ADD: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                       SHARES: tl.constexpr):
        c, s = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1)
        k = tl.arange(0, SHARES)
        place, mask = k[:, None] * C + c[None, :], (k < tl.num_programs(1))[:, None] & (c < C)[None, :]
        there = tl.load(partials + place, mask=mask, other=0.0)
        n = tl.minimum(tl.maximum(M - k * EACH, 0), EACH).to(tl.float32)[:, None]
        mean = tl.sum(there * n, 0) / M
        apart = there - mean[None, :]
        spread = tl.load(partials + tl.num_programs(1) * C + place, mask=mask, other=0.0)
        spread = tl.sum(spread + tl.where(mask, apart * apart * n, 0.0), 0)
        scale = tl.load(weight + c, mask=c < C, other=0.0) * (1.0 / tl.sqrt(spread / M + eps))
        _write(x, add, y, s * EACH, tl.minimum(M, s * EACH + EACH), c, M, C, P, mean, scale, tl.load(bias + c, mask=c < C, other=0.0),
               ADD, RELU, LAST, ROWS)
        if s == 0:
            _record(mean, spread, c, M, C, eps, momentum, means, stds, run_mean, run_var, batches, tl.program_id(0) == 0)

    @triton.jit
    def _scored(x, add, y, weight, bias, run_mean, run_var, M, C, P: tl.constexpr, EACH, eps,
                ADD: tl.constexpr, RELU: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Outside training: with the running statistics."""
        c, s = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1)
        here = c < C
        scale = tl.load(weight + c, mask=here, other=0.0) / tl.sqrt(tl.load(run_var + c, mask=here, other=1.0) + eps)
        _write(x, add, y, s * EACH, tl.minimum(M, s * EACH + EACH), c, M, C, P, tl.load(run_mean + c, mask=here, other=0.0), scale,
               tl.load(bias + c, mask=here, other=0.0), ADD, RELU, LAST, ROWS)

    @triton.jit
    def _arrived(g, x, y, place, mask, mean, std, scale, shift, RELU: tl.constexpr, ADD: tl.constexpr):
        """The gradient before the ReLU, and the normalised number. `std` is one over the standard deviation. What the ReLU saw is
        computed again, as `_write` does, unless something was added to it: reading y takes longer."""
        grad = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
        apart = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        if RELU:
            if ADD:
                seen = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
            else:
                seen = apart * scale[None, :] + shift[None, :]
            grad = tl.where(seen > 0.0, grad, 0.0)
        return grad, tl.where(mask, apart * std[None, :], 0.0)

    @triton.jit
    def _known(weight, bias, means, stds, c, C):
        """A channel's mean, one over its standard deviation, the product of that and its weight, and its bias."""
        here = c < C
        std = tl.load(stds + c, mask=here, other=0.0)
        scale = tl.load(weight + c, mask=here, other=0.0) * std
        return tl.load(means + c, mask=here, other=0.0), std, scale, tl.load(bias + c, mask=here, other=0.0)

    @triton.jit
    def _sums(g, x, y, first, end, c, M, C, P: tl.constexpr, mean, std, scale, shift,
              RELU: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        """Σ g and Σ g·x̂, which are the gradients of bias and weight."""
        plain, turned = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for start in range(first, end, ROWS):
            place, mask = _tile(start, c, M, C, P, LAST, ROWS)
            grad, value = _arrived(g, x, y, place, mask, mean, std, scale, shift, RELU, ADD)
            plain += grad
            turned += grad * value
        return tl.sum(plain, 0), tl.sum(turned, 0)

    @triton.jit
    def _write_back(g, x, y, dx, dadd, first, end, c, M, C, P: tl.constexpr, mean, std, scale, shift, plain, turned,
                    RELU: tl.constexpr, ADD: tl.constexpr, SHARE: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr):
        """∂x = γ/σ·(g − Σg/M − x̂·Σ(g·x̂)/M); the map that was added gets g."""
        plain, turned = plain / M, turned / M
        for start in range(first, end, ROWS):
            place, mask = _tile(start, c, M, C, P, LAST, ROWS)
            grad, value = _arrived(g, x, y, place, mask, mean, std, scale, shift, RELU, ADD)
            tl.store(dx + place, (scale[None, :] * (grad - plain[None, :] - value * turned[None, :])).to(dx.dtype.element_ty), mask=mask)
            if SHARE:
                tl.store(dadd + place, grad.to(dadd.dtype.element_ty), mask=mask)

    @triton.jit
    def _backward(g, x, y, dx, dadd, weight, bias, means, stds, dweight, dbias, M, C, P: tl.constexpr,
                  RELU: tl.constexpr, ADD: tl.constexpr, SHARE: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        c = tl.program_id(0) * COLS + tl.arange(0, COLS)
        mean, std, scale, shift = _known(weight, bias, means, stds, c, C)
        plain, turned = _sums(g, x, y, 0, M, c, M, C, P, mean, std, scale, shift, RELU, ADD, LAST, ROWS, COLS)
        tl.store(dbias + c, plain, mask=c < C)
        tl.store(dweight + c, turned, mask=c < C)
        _write_back(g, x, y, dx, dadd, 0, M, c, M, C, P, mean, std, scale, shift, plain, turned, RELU, ADD, SHARE, LAST, ROWS)

    @triton.jit
    def _backward_partials(g, x, y, partials, weight, bias, means, stds, M, C, P: tl.constexpr, EACH,
                           RELU: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
        c, s = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1)
        mean, std, scale, shift = _known(weight, bias, means, stds, c, C)
        plain, turned = _sums(g, x, y, s * EACH, tl.minimum(M, s * EACH + EACH), c, M, C, P, mean, std, scale, shift,
                              RELU, ADD, LAST, ROWS, COLS)
        tl.store(partials + s * C + c, plain, mask=c < C)
        tl.store(partials + (tl.num_programs(1) + s) * C + c, turned, mask=c < C)

    @triton.jit
    def _backward_apply(g, x, y, dx, dadd, partials, weight, bias, means, stds, dweight, dbias, M, C, P: tl.constexpr, EACH,
                        RELU: tl.constexpr, ADD: tl.constexpr, SHARE: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr,
                        COLS: tl.constexpr, SHARES: tl.constexpr):
        c, s = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(1)
        k = tl.arange(0, SHARES)
        place, mask = k[:, None] * C + c[None, :], (k < tl.num_programs(1))[:, None] & (c < C)[None, :]
        plain = tl.sum(tl.load(partials + place, mask=mask, other=0.0), 0)
        turned = tl.sum(tl.load(partials + tl.num_programs(1) * C + place, mask=mask, other=0.0), 0)
        mean, std, scale, shift = _known(weight, bias, means, stds, c, C)
        if s == 0:
            tl.store(dbias + c, plain, mask=c < C)
            tl.store(dweight + c, turned, mask=c < C)
        _write_back(g, x, y, dx, dadd, s * EACH, tl.minimum(M, s * EACH + EACH), c, M, C, P, mean, std, scale, shift, plain, turned,
                    RELU, ADD, SHARE, LAST, ROWS)


def usable(norm: Any, x: Tensor, add: Tensor | None) -> bool:
    """Whether the kernels compute what these layers would. `norm` is a BatchNorm layer that nobody listens to."""
    if triton is None or not x.is_cuda or torch.jit.is_tracing():
        return False
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() not in (2, 4) or x.numel() >= 1 << 31:
        return False
    weight, bias, mean = norm.weight, norm.bias, norm.running_mean
    if weight is None or bias is None or mean is None or norm.num_batches_tracked is None or norm.momentum is None:
        return False
    if not (weight.dtype == bias.dtype == mean.dtype == torch.float32) or x.shape[1] != len(weight) or x.numel() <= x.shape[1]:
        return False
    if not norm.training and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, add, weight, bias)):
        return False                                  # the gradient outside training is PyTorch's
    return add is None or (add.shape == x.shape and add.dtype in (torch.float32, torch.bfloat16) and add.is_cuda)


def above(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def layout(x: Tensor) -> torch.memory_format:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


class _Geometry:
    """How the programs of a launch divide a map among them."""

    def __init__(self, x: Tensor, tile: int, sums: bool = True) -> None:
        self.C = x.shape[1]
        self.P = x.numel() // (len(x) * self.C)
        self.M = len(x) * self.P
        self.last = layout(x) is torch.channels_last or x.dim() == 2
        self.places = 1 if self.last else self.P      # where channels come last, kernels have no use for it: one of them serves all maps
        self.cols = min(above(self.C), 32 // x.element_size()) if self.last else 1      # what memory delivers at once
        self.shared = not sums or self.M * self.cols * x.element_size() > ALONE
        if self.shared and self.last:
            self.cols = min(above(self.C), 64)
        if self.shared:
            tile = BACK_TILE
        self.rows = min(above(self.M), tile // self.cols)
        tiles = -(-self.M // self.rows)
        self.each = self.rows * -(-tiles // (SHARES if sums else MOST_PROGRAMS))      # positions of one program
        self.warps = min(16, max(4, self.rows * self.cols // 512))
        self.grid = -(-self.C // self.cols), -(-self.M // self.each) if self.shared else 1

    def partials(self, x: Tensor) -> Tensor:
        return torch.empty(2, self.grid[1], self.C, dtype=torch.float32, device=x.device)


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, norm: Any, relu: bool) -> Tensor:
        form = layout(x)
        x = x.contiguous(memory_format=form)
        add = None if add is None else add.contiguous(memory_format=form)
        y = torch.empty_like(x, dtype=x.dtype if add is None else torch.promote_types(x.dtype, add.dtype))
        statistics = torch.empty_like(weight), torch.empty_like(weight)
        at, other = _Geometry(x, TILE), x if add is None else add
        moved = norm.running_mean, norm.running_var, norm.num_batches_tracked
        how = {"ADD": add is not None, "RELU": relu, "LAST": at.last, "ROWS": at.rows, "COLS": at.cols, "num_warps": at.warps}
        with torch.cuda.device_of(x):
            if at.shared:
                partials = at.partials(x)
                _forward_partials[at.grid](x, partials, at.M, at.C, at.places, at.each, at.last, at.rows, at.cols, num_warps=at.warps)
                _forward_apply[at.grid](x, other, y, partials, weight, bias, *statistics, *moved, at.M, at.C, at.places, at.each, norm.eps,
                                        norm.momentum, SHARES=above(at.grid[1]), **how)
            else:
                _forward[at.grid](x, other, y, weight, bias, *statistics, *moved, at.M, at.C, at.places, norm.eps, norm.momentum, **how)
        for t in moved:
            torch.autograd.graph.increment_version(t)      # a graph that saved them must see that they moved
        ctx.save_for_backward(x, y if relu and add is not None else x, weight, bias, *statistics)
        ctx.relu, ctx.add_type = relu, None if add is None else add.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, *known = ctx.saved_tensors               # of every channel: weight, bias, mean, one over the standard deviation
        weight = known[0]
        g = grads[0].contiguous(memory_format=layout(x))
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        share = ctx.add_type is not None and ctx.relu and ctx.needs_input_grad[1]
        dadd: Tensor | None = torch.empty_like(x, dtype=ctx.add_type) if share else dx
        at = _Geometry(x, BACK_TILE)
        how = {"RELU": ctx.relu, "ADD": ctx.add_type is not None, "LAST": at.last, "ROWS": at.rows, "COLS": at.cols, "num_warps": at.warps}
        with torch.cuda.device_of(x):
            if at.shared:
                partials = at.partials(x)
                _backward_partials[at.grid](g, x, y, partials, *known, at.M, at.C, at.places, at.each, **how)
                _backward_apply[at.grid](g, x, y, dx, dadd, partials, *known, dweight, dbias, at.M, at.C, at.places, at.each,
                                         SHARE=share, SHARES=above(at.grid[1]), **how)
            else:
                _backward[at.grid](g, x, y, dx, dadd, *known, dweight, dbias, at.M, at.C, at.places, SHARE=share, **how)
        if not share:
            dadd = grads[0].to(ctx.add_type) if ctx.add_type is not None and ctx.needs_input_grad[1] else None
        return dx, dadd, dweight, dbias, None, None


def norm_relu(norm: Any, x: Tensor, add: Tensor | None, relu: bool) -> Tensor:
    """relu(norm(x) + add), where `usable`."""
    if norm.training:
        return _NormRelu.apply(x, add, norm.weight, norm.bias, norm, relu)
    x = x.contiguous(memory_format=layout(x))
    other = x if add is None else add.contiguous(memory_format=layout(x))
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, other.dtype))
    at = _Geometry(x, TILE, sums=False)
    with torch.cuda.device_of(x):
        _scored[at.grid](x, other, y, norm.weight, norm.bias, norm.running_mean, norm.running_var, at.M, at.C, at.places, at.each, norm.eps,
                         add is not None, relu, at.last, at.rows, at.cols, num_warps=at.warps)
    return y
