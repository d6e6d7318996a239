"""Mean cross-entropy as one CUDA kernel forward and one backward.

PyTorch's takes six: log-softmax, the gather, two fills, and both of the first backwards. In a step of a small model that is a tenth of
what is launched. Sums run in a fixed order, within one program, so that the same numbers give the same loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CLASSES = 1024
TILE = 2048              # numbers that a program holds at a time
MOST = 1 << 15           # logits, padded; more of them keep one program busy for too long

if triton is not None:
    @triton.jit
    def _tile(logits, target, row, rows, C, SOFT: tl.constexpr, COLUMNS: tl.constexpr):
        """log-softmax of some rows, and their targets as probabilities; outside the tensor both are 0."""
        column = tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows)[:, None] & (column < C)
        at = row[:, None] * C + column
        x = tl.load(logits + at, mask=inside, other=-float("inf"))
        x = tl.where((row < rows)[:, None], x, 0.0)            # rows that do not exist are finite all the same
        x = x - tl.max(x, axis=1)[:, None]
        log_p = x - tl.log(tl.sum(tl.exp(x), axis=1))[:, None]
        if SOFT:
            t = tl.load(target + at, mask=inside, other=0.0)
        else:
            label = tl.load(target + row, mask=row < rows, other=0)
            t = (column == label[:, None]).to(tl.float32)
            # a label that is no class is an error; PyTorch stops the device, here the loss says so
            t = tl.where(((label < 0) | (label >= C))[:, None], float("nan"), t)
        return at, inside, tl.where(inside, log_p, 0.0), tl.where(inside, t, 0.0)

    @triton.jit
    def _forward_kernel(logits, target, out, rows, C, SOFT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, rows, ROWS):
            _at, _inside, log_p, t = _tile(logits, target, start + tl.arange(0, ROWS), rows, C, SOFT, COLUMNS)
            # a class ruled out by a logit of −∞ costs nothing where it is not the label
            total -= tl.sum(t * log_p if SOFT else tl.where(t == 0, 0.0, t * log_p), axis=1)
        tl.store(out, tl.sum(total, axis=0) / rows)

    @triton.jit
    def _backward_kernel(logits, target, upstream, out, rows, C, SOFT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at, inside, log_p, t = _tile(logits, target, row, rows, C, SOFT, COLUMNS)
        p = tl.exp(log_p)
        if SOFT:
            p = p * tl.sum(t, axis=1)[:, None]
        tl.store(out + at, (p - t) * (tl.load(upstream) / rows), mask=inside)


def usable(logits: Tensor, target: Tensor) -> bool:
    if triton is None or not logits.is_cuda or logits.dtype != torch.float32 or logits.dim() != 2 or not target.is_cuda:
        return False
    rows, classes = logits.shape
    fits = 0 < classes <= CLASSES and 0 < rows * triton.next_power_of_2(classes) <= MOST
    hard = target.dtype == torch.int64 and target.shape == (rows,)
    soft = target.dtype == torch.float32 and target.shape == logits.shape and not target.requires_grad
    return fits and (hard or soft)


class CrossEntropy(torch.autograd.Function):
    """Gradients reach the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        logits, target = logits.contiguous(), target.contiguous()
        out = torch.empty((), dtype=torch.float32, device=logits.device)
        rows, classes, soft, columns, at_once = _shape(logits, target)
        with torch.cuda.device_of(logits):
            _forward_kernel[(1,)](logits, target, out, rows, classes, soft, columns, at_once)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, target = ctx.saved_tensors
        rows, classes, soft, columns, at_once = _shape(logits, target)
        if torch.is_grad_enabled():                            # somebody wants the gradient's own gradient: in tensor operations
            p = logits.softmax(1)
            t = target if soft else (target[:, None] == torch.arange(classes, device=target.device)).to(p.dtype)
            return (p * t.sum(1, keepdim=True) - t) * (grads[0] / rows), None
        logits, target = logits.contiguous(), target.contiguous()
        out = torch.empty_like(logits)
        with torch.cuda.device_of(logits):
            _backward_kernel[(triton.cdiv(rows, at_once),)](logits, target, grads[0], out, rows, classes, soft, columns, at_once)
        return out, None


def _shape(logits: Tensor, target: Tensor) -> tuple[int, int, bool, int, int]:
    """Rows, classes, whether targets are probabilities, and the tile's columns and rows."""
    rows, classes = logits.shape
    columns = triton.next_power_of_2(classes)
    return rows, classes, target.is_floating_point(), columns, max(1, min(triton.next_power_of_2(rows), TILE // columns))
