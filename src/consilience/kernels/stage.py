"""Convolution, ReLU and 2×2 pooling as one CUDA kernel forward; backward two, and where the input needs a gradient cuDNN's and one more.

Few channels leave cuDNN's kernels with a handful of blocks: 287 µs for the weights' gradient of MOON's first layer. Here the products
run over blocks of positions, sums over positions are cut into pieces and added in a fixed order, and the map before the pooling is never
written: `place` says which of the four positions of a window was the largest, 4 where the ReLU let nothing through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LARGEST_BATCH, MOST_CHANNELS, LONGEST = 256, 64, 1024      # samples; channels that come out; numbers that one output is a sum of:
                                                           # beyond these cuDNN is better
MOST_NUMBERS = (1 << 31) - (1 << 10)         # of a map: places are int32, and the last block of threads reaches beyond the end
PRECISION = "tf32x3"                         # three products of tensor cores: as exact as float32
PROGRAMS, MOST_PIECES = 528, 128             # a sum over positions is cut into pieces: four programs for each of the GPU's processors

if triton is not None:
    @triton.jit
    def _patches(x, m, k, M, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, P: tl.constexpr,
                 PAD: tl.constexpr):
        """Numbers k of the patches under the pooled positions m: rows × k. A patch is P = side + 1 wide, so it holds all four windows."""
        n, top, left = m // (PH * PW), 2 * ((m // PW) % PH) - PAD, 2 * (m % PW) - PAD
        c, h, w = k // (P * P), top[:, None] + ((k // P) % P)[None, :], left[:, None] + (k % P)[None, :]
        mask = (m < M)[:, None] & (c < C)[None, :]
        if PAD > 0:
            mask &= (h >= 0) & (h < H) & (w >= 0) & (w < W)
        return tl.load(x + ((n * C)[:, None] + c[None, :]) * (H * W) + h * W + w, mask=mask, other=0.0)

    @triton.jit
    def _forward(x, weight, bias, out, place, M, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 CO: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, PRECISION: tl.constexpr):
        """Columns are channels × the four positions of a window, whose weights stand in the patch one to the right or below each other."""
        P: tl.constexpr = SIDE + 1
        m, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, C * P * P, BK):
            k = start + tl.arange(0, BK)
            kh, kw = ((k // P) % P)[:, None] - ((j % 4) // 2)[None, :], (k % P)[:, None] - (j % 2)[None, :]
            mask = (k < C * P * P)[:, None] & (j < 4 * CO)[None, :] & (kh >= 0) & (kh < SIDE) & (kw >= 0) & (kw < SIDE)
            source = ((j // 4 * C)[None, :] + (k // (P * P))[:, None]) * (SIDE * SIDE) + kh * SIDE + kw
            cols = tl.load(weight + source, mask=mask, other=0.0)
            total = tl.dot(_patches(x, m, k, M, C, H, W, PH, PW, P, PAD), cols, total, input_precision=PRECISION)
        four = tl.reshape(total, (BM, BN // 4, 4))
        largest = tl.max(four, 2)
        which = tl.min(tl.where(four == largest[:, :, None], tl.arange(0, 4)[None, None, :], 4), 2)       # the first, as PyTorch has it
        co = tl.program_id(1) * (BN // 4) + tl.arange(0, BN // 4)
        if BIAS:
            largest += tl.load(bias + co, mask=co < CO, other=0.0)[None, :]
        target = ((m // (PH * PW) * CO)[:, None] + co[None, :]) * (PH * PW) + (m % (PH * PW))[:, None]
        mask = (m < M)[:, None] & (co < CO)[None, :]
        tl.store(out + target, tl.where(largest < 0.0, 0.0, largest), mask=mask)
        tl.store(place + target, tl.where(largest > 0.0, which, 4).to(tl.uint8), mask=mask)

    @triton.jit
    def _weights(x, grad, place, part, M, rows, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 CO: tl.constexpr, SIDE: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 PRECISION: tl.constexpr):
        """A piece of the sums over positions, of gradients × patches for each channel and position in the window; then of the gradients."""
        P: tl.constexpr = SIDE + 1
        piece = tl.program_id(0)
        k, j = tl.program_id(1) * BK + tl.arange(0, BK), tl.program_id(2) * BN + tl.arange(0, BN)
        total, sums = tl.zeros((BN, BK), tl.float32), tl.zeros((BN,), tl.float32)
        for start in range(piece * rows, tl.minimum((piece + 1) * rows, M), BM):
            m = start + tl.arange(0, BM)
            source = ((m // (PH * PW) * CO)[:, None] + (j // 4)[None, :]) * (PH * PW) + (m % (PH * PW))[:, None]
            mask = (m < M)[:, None] & (j < 4 * CO)[None, :]
            chosen = tl.load(place + source, mask=mask, other=4).to(tl.int32) == (j % 4)[None, :]
            g = tl.where(chosen, tl.load(grad + source, mask=mask, other=0.0), 0.0)
            total = tl.dot(tl.trans(g), _patches(x, m, k, M, C, H, W, PH, PW, P, PAD), total, input_precision=PRECISION)
            sums += tl.sum(g, 0)
        part += piece * (4 * CO * (C * P * P + 1))
        tl.store(part + j[:, None] * (C * P * P) + k[None, :], total, mask=(j < 4 * CO)[:, None] & (k < C * P * P)[None, :])
        if tl.program_id(1) == 0:
            tl.store(part + 4 * CO * C * P * P + j, sums, mask=j < 4 * CO)

    @triton.jit
    def _add_weights(part, out, pieces, C: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
        """Over pieces and the four positions of a window; after the weights' gradient comes the bias's."""
        P: tl.constexpr = SIDE + 1
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weights = CO * C * SIDE * SIDE
        co, c, kh, kw = i // (C * SIDE * SIDE), (i // (SIDE * SIDE)) % C, (i // SIDE) % SIDE, i % SIDE
        total = tl.zeros((BLOCK,), tl.float32)
        for s in tl.static_range(4):
            here = (co * 4 + s) * (C * P * P) + c * (P * P) + (kh + s // 2) * P + kw + s % 2
            here = tl.where(i < weights, here, 4 * CO * C * P * P + (i - weights) * 4 + s)
            for start in range(0, pieces, AT_ONCE):
                p = start + tl.arange(0, AT_ONCE)
                mask = (p < pieces)[:, None] & (i < weights + CO)[None, :]
                total += tl.sum(tl.load(part + p[:, None] * (4 * CO * (C * P * P + 1)) + here[None, :], mask=mask, other=0.0), 0)
        tl.store(out + i, total, mask=i < weights + CO)

    @triton.jit
    def _unpool(grad, place, out, length, PH: tl.constexpr, PW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
        """The gradient before ReLU and pooling, on maps of H×W."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        maps, h, w = i // (H * W), (i // W) % H, i % W
        mask = (i < length) & (h < 2 * PH) & (w < 2 * PW)
        source = (maps * PH + h // 2) * PW + w // 2
        chosen = tl.load(place + source, mask=mask, other=4).to(tl.int32) == (h % 2) * 2 + w % 2
        tl.store(out + i, tl.where(chosen, tl.load(grad + source, mask=mask, other=0.0), 0.0), mask=i < length)


def usable(x: Tensor, conv: nn.Conv2d) -> bool:
    if triton is None or not x.is_cuda or torch.jit.is_tracing():
        return False
    if x.dim() != 4 or x.dtype != torch.float32 or conv.weight.dtype != torch.float32:
        return False
    side, pad = conv.kernel_size[0], int(conv.padding[0])
    high, wide = x.shape[2] + 2 * pad - side + 1, x.shape[3] + 2 * pad - side + 1      # of the map before the pooling
    return (len(x) <= LARGEST_BATCH and conv.out_channels <= MOST_CHANNELS and conv.in_channels * side * side <= LONGEST
            and x.is_contiguous() and conv.weight.is_contiguous() and min(high, wide) >= 2
            and 0 < x.numel() <= MOST_NUMBERS and len(x) * conv.out_channels * high * wide <= MOST_NUMBERS
            and not torch.is_autocast_enabled("cuda"))


def _columns(n: int) -> int:
    """Columns of a block: tensor cores want sixteen or more."""
    return max(16, min(64, triton.next_power_of_2(4 * n)))


# How work is cut into blocks, found by trying on an H200 (benchmarks/kernels_stage.py): a handful of positions leaves most of the GPU
# idle, so blocks are small where there are few.

def forward_blocks(positions: int, channels_out: int, numbers: int) -> dict[str, int]:
    few = positions <= 1 << 12
    columns = 32 if few and channels_out > 32 else _columns(channels_out)
    return {"BM": 16 if few else 32, "BN": columns, "BK": 64 if few else 32, "num_warps": 4}


def weights_blocks(positions: int, channels_out: int, numbers: int) -> dict[str, int]:
    return {"BM": 32, "BN": 32, "BK": 128 if numbers > 512 else 64, "num_warps": 4}


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, pad: int) -> Tensor:
        n, c, height, width = x.shape
        co, side = len(w), w.shape[2]
        ph, pw = (height + 2 * pad - side + 1) // 2, (width + 2 * pad - side + 1) // 2
        m = n * ph * pw
        out, place = x.new_empty(n, co, ph, pw), torch.empty((n, co, ph, pw), dtype=torch.uint8, device=x.device)
        how = forward_blocks(m, co, c * side * side)
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(m, how["BM"]), triton.cdiv(4 * co, how["BN"]))](
                x, w, w if b is None else b, out, place, m, c, height, width, ph, pw, co, side, pad, b is not None,
                PRECISION=PRECISION, **how)
        ctx.shape, ctx.bias = (m, c, height, width, ph, pw, co, side, pad), b is not None
        ctx.save_for_backward(x, w, place)
        return out

    @staticmethod
    @first_order
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
                      side: int, pad: int) -> tuple[Tensor, Tensor]:
    numbers = c * (side + 1) ** 2
    how = weights_blocks(m, co, numbers)
    wide, high = triton.cdiv(numbers, how["BK"]), triton.cdiv(4 * co, how["BN"])
    pieces = min(triton.cdiv(m, 3 * how["BM"]), max(1, PROGRAMS // (wide * high)), MOST_PIECES)
    rows = triton.cdiv(triton.cdiv(m, pieces), how["BM"]) * how["BM"]
    pieces = triton.cdiv(m, rows)
    part, out = x.new_empty(pieces, 4 * co * (numbers + 1)), x.new_empty(w.numel() + co)
    _weights[(pieces, wide, high)](x, g, place, part, m, rows, c, height, width, ph, pw, co, side, pad, PRECISION=PRECISION, **how)
    at_once = triton.next_power_of_2(pieces)
    block = max(8, min(256, (1 << 11) // at_once))
    _add_weights[(triton.cdiv(len(out), block),)](part, out, pieces, c, co, side, block, at_once)
    return out[: w.numel()].view(w.shape), out[w.numel():]


def _inputs_gradient(x: Tensor, g: Tensor, place: Tensor, w: Tensor, m: int, c: int, height: int, width: int, ph: int, pw: int, co: int,
                     side: int, pad: int) -> Tensor:
    """By cuDNN: a kernel that gathers the gradients it needs took 33 µs in DBE's second stage, unpooling and cuDNN 17."""
    high, wide = height + 2 * pad - side + 1, width + 2 * pad - side + 1
    before = x.new_empty(len(x), co, high, wide)
    _unpool[(triton.cdiv(before.numel(), 512),)](g, place, before, before.numel(), ph, pw, high, wide, 512)
    return torch.ops.aten.convolution_backward(before, x, w, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], 1, [True, False, False])[0]


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """max-pool(relu(conv(x)))."""
    out: Tensor = _Stage.apply(x, weight, bias, padding)
    return out
