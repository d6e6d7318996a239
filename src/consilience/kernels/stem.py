"""The first convolution of a model in bfloat16, where an output is a sum of few products, as one CUDA kernel forward and two backward.

cuDNN computes with eight channels or more: it pads those of a picture, in a kernel of its own, each way, and with 1 × 3 × 3 products most
of what it then computes is zero; the gradient of the weights keeps 7 of a GPU's 132 processors busy for 150 µs. Here a program picks the
numbers under its positions from the picture as it is, in float32, and rounds them. The gradient of the weights is a sum over all positions,
cut into pieces that are added in a fixed order. No gradient is made for the picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..channels_last import is_turned
from .batch_norm import above
from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LONGEST, MOST_CHANNELS = 32, 128        # products of one output; channels that come out: beyond these cuDNN is better
FEWEST = 8                              # channels that cuDNN takes without padding
BLOCK, PIECES = 64, 132                 # positions that a program holds at once; pieces of a sum, one for each of an H200's processors
WIDE = False                            # products of float32: Triton's interpreter has none of bfloat16
MOST_NUMBERS = (1 << 31) - (1 << 15)    # of a map: places are int32, and the last program reaches beyond the end

if triton is not None:
    @triton.jit
    def _patches(x, m, k, M, N_STEP, C_STEP, H_STEP, W_STEP, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
                 OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr):
        """The numbers under positions m, rounded: positions × products."""
        n, top, left = m // (OH * OW), (m // OW) % OH * STRIDE - PAD, m % OW * STRIDE - PAD
        c, h, w = k // (KH * KW), top[:, None] + (k // KW % KH)[None, :], left[:, None] + (k % KW)[None, :]
        there = (m < M)[:, None] & (c < C)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        place = (n * N_STEP)[:, None] + (c * C_STEP)[None, :] + h * H_STEP + w * W_STEP
        return tl.load(x + place, mask=there, other=0.0).to(tl.bfloat16)

    @triton.jit
    def _products(a, b, total, WIDE: tl.constexpr):
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, total)

    @triton.jit
    def _kernel_places(k, co, CO_STEP, C_STEP, H_STEP, W_STEP, KH: tl.constexpr, KW: tl.constexpr):
        """Where product k of output co lies in the weights: one axis each, to be broadcast."""
        return co * CO_STEP + k // (KH * KW) * C_STEP + k // KW % KH * H_STEP + k % KW * W_STEP

    @triton.jit
    def _forward(x, weight, out, M, x0, x1, x2, x3, w0, w1, w2, w3, CO: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                 OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
        m, co, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
        source = _kernel_places(k[:, None], co[None, :], w0, w1, w2, w3, KH, KW)
        columns = tl.load(weight + source, mask=(k < C * KH * KW)[:, None] & (co < CO)[None, :], other=0.0)
        rows = _patches(x, m, k, M, x0, x1, x2, x3, C, H, W, OH, OW, KH, KW, STRIDE, PAD)
        total = _products(rows, columns, tl.zeros((BM, BN), tl.float32), WIDE)
        tl.store(out + m[:, None] * CO + co[None, :], total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (co < CO)[None, :])

    @triton.jit
    def _weights(x, grad, parts, M, rows, x0, x1, x2, x3, CO: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                 OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr):
        """A piece of the sums over positions."""
        co, k = tl.arange(0, BN), tl.arange(0, BK)
        first = tl.program_id(0) * rows
        end = tl.minimum(first + rows, M)
        total = tl.zeros((BN, BK), tl.float32)
        for start in range(first, end, BM):
            m = start + tl.arange(0, BM)
            g = tl.load(grad + m[:, None] * CO + co[None, :], mask=(m < end)[:, None] & (co < CO)[None, :], other=0.0)
            total = _products(tl.trans(g), _patches(x, m, k, M, x0, x1, x2, x3, C, H, W, OH, OW, KH, KW, STRIDE, PAD), total, WIDE)
        tl.store(parts + (tl.program_id(0) * BN + co)[:, None] * BK + k[None, :], total)

    @triton.jit
    def _add_up(parts, dweight, pieces, w0, w1, w2, w3, CO: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, AT_ONCE: tl.constexpr):
        """One program for each output."""
        co, k = tl.program_id(0), tl.arange(0, BK)
        total = tl.zeros((AT_ONCE, BK), tl.float32)
        for start in range(0, pieces, AT_ONCE):
            p = start + tl.arange(0, AT_ONCE)
            total += tl.load(parts + (p * BN + co)[:, None] * BK + k[None, :], mask=(p < pieces)[:, None], other=0.0)
        target = _kernel_places(k, co, w0, w1, w2, w3, KH, KW)
        tl.store(dweight + target, tl.sum(total, 0).to(dweight.dtype.element_ty), mask=k < C * KH * KW)


def usable(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels compute this convolution of maps whose channels lie side by side, and are worth it."""
    if triton is None or not x.is_cuda or torch.jit.is_tracing() or x.dim() != 4 or not len(x) or x.requires_grad:
        return False
    if x.dtype not in (torch.float32, torch.bfloat16) or x.shape[1] != conv.in_channels or not (is_turned(x) or is_turned(conv.weight)):
        return False
    (kh, kw), stride, pad = conv.kernel_size, conv.stride, conv.padding
    if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding_mode != "zeros" or isinstance(pad, str):
        return False
    if stride[0] != stride[1] or pad[0] != pad[1] or min(x.shape[2] + 2 * pad[0] - kh, x.shape[3] + 2 * pad[0] - kw) < 0:
        return False
    return (conv.in_channels < FEWEST and conv.in_channels * kh * kw <= LONGEST and conv.out_channels <= MOST_CHANNELS
            and len(x) * conv.out_channels * (x.shape[2] + 2 * pad[0]) * (x.shape[3] + 2 * pad[0]) < MOST_NUMBERS)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        n, c, h, w = x.shape
        co, _, kh, kw = weight.shape
        oh, ow = (h + 2 * pad - kh) // stride + 1, (w + 2 * pad - kw) // stride + 1
        out = torch.empty((n, co, oh, ow), dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
        sizes = (co, c, h, w, oh, ow, kh, kw, stride, pad)
        ctx.positions, ctx.sizes = n * oh * ow, sizes
        ctx.how = {"BN": max(16, above(co)), "BK": max(16, above(c * kh * kw)), "WIDE": WIDE, "num_warps": 4}
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(ctx.positions, 2 * BLOCK),)](x, weight, out, ctx.positions, *x.stride(), *weight.stride(), *sizes,
                                                               BM=2 * BLOCK, **ctx.how)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g, dweight = grads[0].contiguous(memory_format=torch.channels_last), torch.empty_like(weight)
        co, c, _, _, _, _, kh, kw, _, _ = ctx.sizes
        rows = triton.cdiv(triton.cdiv(ctx.positions, PIECES), BLOCK) * BLOCK
        pieces = triton.cdiv(ctx.positions, rows)
        parts = torch.empty((pieces, ctx.how["BN"], ctx.how["BK"]), dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _weights[(pieces,)](x, g, parts, ctx.positions, rows, *x.stride(), *ctx.sizes, BM=BLOCK, **ctx.how)
            _add_up[(co,)](parts, dweight, pieces, *weight.stride(), co, c, kh, kw, ctx.how["BN"], ctx.how["BK"], AT_ONCE=64, num_warps=4)
        return None, dweight, None, None


def convolved(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """What the convolution with these weights, in bfloat16, gives before a bias is added, where `usable`."""
    return _Convolved.apply(x, weight, int(conv.stride[0]), int(conv.padding[0]))
