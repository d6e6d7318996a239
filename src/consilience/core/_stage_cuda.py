"""Convolution, ReLU and 2×2 pooling as one CUDA kernel forward; three backward, two where the input needs no gradient.

Few channels leave cuDNN's kernels with a handful of blocks: 287 µs for the weights' gradient of MOON's first layer. Here the products
run over blocks of positions, sums over positions are cut into pieces and added in a fixed order, and the map before the pooling is never
written: `place` says which of the four positions of a window was the largest, 4 where the ReLU let nothing through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MOST_CHANNELS, LONGEST = 64, 1024            # channels that come out; numbers that one output is a sum of: beyond these cuDNN is better
PRECISION = "tf32x3"                         # three products of tensor cores: as exact as float32
PIECES = 264                                 # programs to cut a sum over positions into: two for each of the GPU's processors

if triton is not None:
    @triton.jit
    def _windows(m, M, PH, PW, PAD: tl.constexpr, BM: tl.constexpr):
        """Four rows for each pooled position of m: sample, corner of the patch, and whether the row exists."""
        r = tl.arange(0, 4 * BM)
        at = m + r // 4
        n, rest = at // (PH * PW), at % (PH * PW)
        top = 2 * (rest // PW) + (r % 4) // 2 - PAD
        left = 2 * (rest % PW) + r % 2 - PAD
        return n, top, left, at < M

    @triton.jit
    def _patches(x, n, top, left, here, k, C, H, W, KT, SIDE: tl.constexpr, PAD: tl.constexpr):
        """Numbers k of the patches: rows × k."""
        c, kh, kw = k // (SIDE * SIDE), (k // SIDE) % SIDE, k % SIDE
        h, w = top[:, None] + kh[None, :], left[:, None] + kw[None, :]
        mask = here[:, None] & (k < KT)[None, :]
        if PAD > 0:
            mask &= (h >= 0) & (h < H) & (w >= 0) & (w < W)
        return tl.load(x + ((n * C)[:, None] + c[None, :]) * (H * W) + h * W + w, mask=mask, other=0.0)

    @triton.jit
    def _forward(x, weight, bias, out, place, M, C, H, W, PH, PW, CO, KT, BIAS: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
        m0 = tl.program_id(0) * BM
        n, top, left, here = _windows(m0, M, PH, PW, PAD, BM)
        co = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros((4 * BM, BN), tl.float32)
        for start in range(0, KT, BK):
            k = start + tl.arange(0, BK)
            cols = tl.load(weight + co[None, :] * KT + k[:, None], mask=(co < CO)[None, :] & (k < KT)[:, None], other=0.0)
            total = tl.dot(_patches(x, n, top, left, here, k, C, H, W, KT, SIDE, PAD), cols, total, input_precision=PRECISION)
        four = tl.reshape(total, (BM, 4, BN))
        largest = tl.max(four, 1)
        which = tl.min(tl.where(four == largest[:, None, :], tl.arange(0, 4)[None, :, None], 4), 1)       # the first, as PyTorch has it
        if BIAS:
            largest += tl.load(bias + co, mask=co < CO, other=0.0)[None, :]
        m = m0 + tl.arange(0, BM)
        mask = (m < M)[:, None] & (co < CO)[None, :]
        target = ((m // (PH * PW)) * CO)[:, None] * (PH * PW) + co[None, :] * (PH * PW) + (m % (PH * PW))[:, None]
        tl.store(out + target, tl.where(largest < 0.0, 0.0, largest), mask=mask)
        tl.store(place + target, tl.where(largest > 0.0, which, 4).to(tl.uint8), mask=mask)

    @triton.jit
    def _weights(x, grad, place, part, M, C, H, W, PH, PW, CO, KT, rows, length, SIDE: tl.constexpr, PAD: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
        """A piece of the sum over positions: dW[co, k] = Σ g·patch, and after all of them db[co] = Σ g."""
        piece = tl.program_id(0)
        k = tl.program_id(1) * BK + tl.arange(0, BK)
        co = tl.program_id(2) * BN + tl.arange(0, BN)
        total, sums = tl.zeros((BN, BK), tl.float32), tl.zeros((BN,), tl.float32)
        for start in range(piece * rows, tl.minimum((piece + 1) * rows, M), BM):
            n, top, left, here = _windows(start, M, PH, PW, PAD, BM)
            r = tl.arange(0, 4 * BM)
            at = start + r // 4
            mask = here[:, None] & (co < CO)[None, :]
            source = ((at // (PH * PW)) * CO)[:, None] * (PH * PW) + co[None, :] * (PH * PW) + (at % (PH * PW))[:, None]
            chosen = tl.load(place + source, mask=mask, other=4).to(tl.int32) == (r % 4)[:, None]
            g = tl.where(chosen, tl.load(grad + source, mask=mask, other=0.0), 0.0)
            patches = _patches(x, n, top, left, here, k, C, H, W, KT, SIDE, PAD)
            total = tl.dot(tl.trans(g), patches, total, input_precision=PRECISION)
            sums += tl.sum(g, 0)
        part += piece * length
        tl.store(part + co[:, None] * KT + k[None, :], total, mask=(co < CO)[:, None] & (k < KT)[None, :])
        if tl.program_id(1) == 0:
            tl.store(part + CO * KT + co, sums, mask=co < CO)

    @triton.jit
    def _add_pieces(part, out, pieces, length, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, pieces, AT_ONCE):
            p = start + tl.arange(0, AT_ONCE)
            mask = (p < pieces)[:, None] & (i < length)[None, :]
            total += tl.sum(tl.load(part + p[:, None] * length + i[None, :], mask=mask, other=0.0), 0)
        tl.store(out + i, total, mask=i < length)

    @triton.jit
    def _inputs(grad, place, weight, dx, M, C, H, W, PH, PW, CO, SIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
        """dx[n, c, h, w] = Σ over co, kh, kw of the gradient at (h + pad − kh, w + pad − kw) times the weight."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        n, h, w = m // (H * W), (m // W) % H, m % W
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, CO * SIDE * SIDE, BK):
            k = start + tl.arange(0, BK)
            co, kh, kw = k // (SIDE * SIDE), (k // SIDE) % SIDE, k % SIDE
            oh, ow = h[:, None] + PAD - kh[None, :], w[:, None] + PAD - kw[None, :]
            mask = (m < M)[:, None] & (co < CO)[None, :] & (oh >= 0) & (oh < 2 * PH) & (ow >= 0) & (ow < 2 * PW)
            source = ((n * CO)[:, None] + co[None, :]) * (PH * PW) + (oh // 2) * PW + ow // 2
            chosen = tl.load(place + source, mask=mask, other=4).to(tl.int32) == (oh % 2) * 2 + ow % 2
            g = tl.where(chosen, tl.load(grad + source, mask=mask, other=0.0), 0.0)
            cols = tl.load(weight + ((co * C)[:, None] + c[None, :]) * (SIDE * SIDE) + (kh * SIDE + kw)[:, None],
                           mask=(co < CO)[:, None] & (c < C)[None, :], other=0.0)
            total = tl.dot(g, cols, total, input_precision=PRECISION)
        tl.store(dx + ((n * C)[:, None] + c[None, :]) * (H * W) + (m % (H * W))[:, None], total, mask=(m < M)[:, None] & (c < C)[None, :])


def usable(x: Tensor, conv: nn.Conv2d) -> bool:
    if triton is None or not x.is_cuda or x.dim() != 4 or x.dtype != torch.float32 or conv.weight.dtype != torch.float32:
        return False
    side, pad = conv.kernel_size[0], int(conv.padding[0])
    return (conv.out_channels <= MOST_CHANNELS and conv.in_channels * side * side <= LONGEST and x.is_contiguous()
            and conv.weight.is_contiguous() and min(x.shape[2:]) + 2 * pad - side + 1 >= 2 and 0 < x.numel() < 1 << 31
            and not torch.is_autocast_enabled("cuda"))


def _columns(n: int) -> int:
    """Columns of a block: tensor cores want sixteen or more."""
    return max(16, min(32, triton.next_power_of_2(n)))


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, pad: int) -> Tensor:
        n, c, height, width = x.shape
        co, side = len(w), w.shape[2]
        ph, pw = (height + 2 * pad - side + 1) // 2, (width + 2 * pad - side + 1) // 2
        m, kt = n * ph * pw, c * side * side
        out, place = x.new_empty(n, co, ph, pw), torch.empty((n, co, ph, pw), dtype=torch.uint8, device=x.device)
        bm, bn, bk = 8 if m <= 1 << 12 else 32, _columns(co), 64 if kt >= 64 else 32
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(m, bm), triton.cdiv(co, bn))](x, w, w if b is None else b, out, place, m, c, height, width, ph, pw,
                                                                co, kt, b is not None, side, pad, bm, bn, bk, PRECISION)
        ctx.shape, ctx.bias = (m, c, height, width, ph, pw, co, kt, side, pad), b is not None
        ctx.save_for_backward(x, w, place)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, place = ctx.saved_tensors
        g = grads[0].contiguous()
        dx = dw = db = None
        with torch.cuda.device_of(x):
            if any(ctx.needs_input_grad[1:3]):
                dw, db = _weights_gradient(x, g, place, w, *ctx.shape)
            if ctx.needs_input_grad[0]:
                dx = _inputs_gradient(x, g, place, w, *ctx.shape)
        return dx, dw, db if ctx.bias else None, None


def _weights_gradient(x: Tensor, g: Tensor, place: Tensor, w: Tensor, m: int, c: int, height: int, width: int, ph: int, pw: int, co: int,
                      kt: int, side: int, pad: int) -> tuple[Tensor, Tensor]:
    length = co * kt + co
    bm, bn, bk = 16, _columns(co), _columns(kt)
    blocks = triton.cdiv(kt, bk) * triton.cdiv(co, bn)
    rows = triton.cdiv(triton.cdiv(m, max(1, PIECES // blocks)), bm) * bm
    pieces = triton.cdiv(m, rows)
    part = x.new_empty(pieces, length)
    _weights[(pieces, triton.cdiv(kt, bk), triton.cdiv(co, bn))](x, g, place, part, m, c, height, width, ph, pw, co, kt, rows, length,
                                                                  side, pad, bm, bn, bk, PRECISION)
    if pieces > 1:
        out = x.new_empty(length)
        _add_pieces[(triton.cdiv(length, 128),)](part, out, pieces, length, 128, 16)
    else:
        out = part[0]
    return out[: co * kt].view(w.shape), out[co * kt:]


def _inputs_gradient(x: Tensor, g: Tensor, place: Tensor, w: Tensor, m: int, c: int, height: int, width: int, ph: int, pw: int, co: int,
                     kt: int, side: int, pad: int) -> Tensor:
    dx = torch.empty_like(x)
    positions = len(x) * height * width
    bm, bn = 32 if positions <= 1 << 13 else 64, _columns(c)
    _inputs[(triton.cdiv(positions, bm), triton.cdiv(c, bn))](g, place, w, dx, positions, c, height, width, ph, pw, co, side, pad,
                                                               bm, bn, 64, PRECISION)
    return dx


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """max-pool(relu(conv(x)))."""
    out: Tensor = _Stage.apply(x, weight, bias, padding)
    return out
