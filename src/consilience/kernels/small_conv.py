"""Convolutions of small maps in bfloat16 with channels_last, as one CUDA kernel forward and one or two for each gradient.

cuDNN's kernels for an H200 take all of a processor's shared memory, so that clients which train beside each other wait for processors.
Here a program takes 16 to 64 KiB and 128 threads, and several of them share one. The rows of its tile are one position of many samples,
not many positions of one: which places of the kernel meet the map there is then one question for the whole program, products by padding
are left out, and no number has to be asked for its place. Where maps are 2×2 that leaves 4 of 9 products.

Forward and for the gradient of the maps a program sums over the places of the kernel and the channels; for the gradient of the weights it
has one place of the kernel and sums over positions and samples. Where few programs would do that, the positions are cut into pieces, whose
sums a second kernel adds in a fixed order. All sums are float32, rounded once.

Each of the three passes is taken over by itself (`TAKEN`); the others are cuDNN's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch_norm import above
from .derivatives import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EVEN = 16                               # channels are multiples of this: loads of 16 bytes, and products of tensor cores
WIDE = False                            # products of float32: Triton's interpreter has none of bfloat16
MOST_NUMBERS = (1 << 31) - (1 << 24)    # of a tensor: places are int32, and the last program reaches beyond the end
ADDED = 1024                            # numbers of a program that adds up pieces

if triton is not None:
    @triton.jit
    def _tile(start, row, column, STEP: tl.constexpr, rows, columns: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr):
        """rows × columns, of which rows are STEP numbers apart; zeros beyond the last ones."""
        place = start + row[:, None] * STEP + column[None, :]
        if ALL_ROWS and ALL_COLUMNS:
            return tl.load(place)
        elif ALL_ROWS:
            return tl.load(place, mask=(column < columns)[None, :], other=0.0)
        elif ALL_COLUMNS:
            return tl.load(place, mask=(row < rows)[:, None], other=0.0)
        else:
            return tl.load(place, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)

    @triton.jit
    def _products(a, b, total, WIDE: tl.constexpr):
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, total)

    @triton.jit
    def _next(c, i, j, C: tl.constexpr, BLOCK: tl.constexpr, wide):
        """The next channels, and after the last of them the next place of a rectangle that is `wide`. Counted on and not divided, so that
        one loop goes through all and the loads of the next turns are under way."""
        c += BLOCK
        turn = c >= C
        c = tl.where(turn, 0, c)
        j = tl.where(turn, j + 1, j)
        over = j >= wide
        return c, tl.where(over, i + 1, i), tl.where(over, 0, j)

    @triton.jit
    def _forward(x, weight, out, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr,
                 OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr):
        """BM samples of one position, BN channels that come out."""
        place = tl.program_id(0) % (OH * OW)
        top, left = place // OW * STRIDE - PH, place % OW * STRIDE - PW
        n, co, k = tl.program_id(0) // (OH * OW) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        first_h, first_w = tl.maximum(0, -top), tl.maximum(0, -left)                # of the kernel, what meets the map
        high = tl.maximum(0, tl.minimum(KH, H - top) - first_h)
        wide = tl.maximum(0, tl.minimum(KW, W - left) - first_w)
        x += ((top + first_h) * W + left + first_w) * C
        weight += (first_h * KW + first_w) * C
        total = tl.zeros((BM, BN), tl.float32)
        c, i, j = 0, 0, 0
        for _ in range(high * wide * ((C + BK - 1) // BK)):
            rows = _tile(x + (i * W + j) * C, n, c + k, H * W * C, N, C, WHOLE, C % BK == 0)
            columns = _tile(weight + (i * KW + j) * C, co, c + k, KH * KW * C, CO, C, CO % BN == 0, C % BK == 0)
            total = _products(rows, tl.trans(columns), total, WIDE)
            c, i, j = _next(c, i, j, C, BK, wide)
        target = out + n[:, None] * (OH * OW * CO) + place * CO + co[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (co < CO)[None, :])

    @triton.jit
    def _maps(grad, weight, dx, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr,
              OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr):
        """BM samples of one position, BN channels that went in. Position h meets row r + STRIDE·i of the kernel in output q - i."""
        place = tl.program_id(0) % (H * W)
        h, w = place // W + PH, place % W + PW
        n, ci, k = tl.program_id(0) // (H * W) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        first_h, first_w = tl.maximum(0, h // STRIDE - (OH - 1)), tl.maximum(0, w // STRIDE - (OW - 1))
        high = tl.maximum(0, tl.minimum(h // STRIDE + 1, (KH - 1 - h % STRIDE + STRIDE) // STRIDE) - first_h)
        wide = tl.maximum(0, tl.minimum(w // STRIDE + 1, (KW - 1 - w % STRIDE + STRIDE) // STRIDE) - first_w)
        grad += ((h // STRIDE - first_h) * OW + w // STRIDE - first_w) * CO
        weight += ((h % STRIDE + STRIDE * first_h) * KW + w % STRIDE + STRIDE * first_w) * C
        total = tl.zeros((BM, BN), tl.float32)
        co, i, j = 0, 0, 0
        for _ in range(high * wide * ((CO + BK - 1) // BK)):
            rows = _tile(grad - (i * OW + j) * CO, n, co + k, OH * OW * CO, N, CO, WHOLE, CO % BK == 0)
            columns = _tile(weight + (i * KW + j) * STRIDE * C, co + k, ci, KH * KW * C, CO, C, CO % BK == 0, C % BN == 0)
            total = _products(rows, columns, total, WIDE)
            co, i, j = _next(co, i, j, CO, BK, wide)
        target = dx + n[:, None] * (H * W * C) + place * C + ci[None, :]
        tl.store(target, total.to(dx.dtype.element_ty), mask=(n < N)[:, None] & (ci < C)[None, :])

    @triton.jit
    def _weights(x, grad, out, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr,
                 OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr):
        """One place of the kernel, BM channels that come out, BN that go in, and of the positions that this place meets one piece."""
        tap, piece = tl.program_id(0) % (KH * KW), tl.program_id(0) // (KH * KW)
        kh, kw = tap // KW, tap % KW
        co, ci, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BK)
        first_h = (tl.maximum(0, PH - kh) + STRIDE - 1) // STRIDE
        first_w = (tl.maximum(0, PW - kw) + STRIDE - 1) // STRIDE
        high = tl.maximum(0, tl.minimum(OH, tl.maximum(0, H - 1 + PH - kh + STRIDE) // STRIDE) - first_h)
        wide = tl.maximum(0, tl.minimum(OW, tl.maximum(0, W - 1 + PW - kw + STRIDE) // STRIDE) - first_w)
        blocks = tl.cdiv(N, BK)
        steps = high * wide * blocks
        first, end = piece * steps // PIECES, (piece + 1) * steps // PIECES
        n, i, j = first % blocks * BK, first // blocks // tl.maximum(1, wide), first // blocks % tl.maximum(1, wide)
        grad += (first_h * OW + first_w) * CO
        x += ((first_h * STRIDE - PH + kh) * W + first_w * STRIDE - PW + kw) * C
        total = tl.zeros((BM, BN), tl.float32)
        for _ in range(first, end):
            rows = _tile(grad + (i * OW + j) * CO, n + k, co, OH * OW * CO, N, CO, WHOLE, CO % BM == 0)
            columns = _tile(x + (i * W + j) * STRIDE * C, n + k, ci, H * W * C, N, C, WHOLE, C % BN == 0)
            total = _products(tl.trans(rows), columns, total, WIDE)
            n += BK
            turn = n >= N
            n = tl.where(turn, 0, n)
            j = tl.where(turn, j + 1, j)
            over = j >= wide
            i, j = tl.where(over, i + 1, i), tl.where(over, 0, j)
        target = out + piece * (CO * KH * KW * C) + co[:, None] * (KH * KW * C) + tap * C + ci[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=(co < CO)[:, None] & (ci < C)[None, :])

    @triton.jit
    def _add_up(parts, dweight, SIZE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = place < SIZE
        total = tl.load(parts + place, mask=there, other=0.0)
        for piece in tl.static_range(1, PIECES):
            total += tl.load(parts + piece * SIZE + place, mask=there, other=0.0)
        tl.store(dweight + place, total.to(dweight.dtype.element_ty), mask=there)


class Layer(NamedTuple):
    """A convolution of maps of one size: all that a kernel is compiled for."""

    c: int
    h: int
    w: int
    co: int
    kh: int
    kw: int
    stride: int
    pad_h: int
    pad_w: int

    @property
    def oh(self) -> int:
        return (self.h + 2 * self.pad_h - self.kh) // self.stride + 1

    @property
    def ow(self) -> int:
        return (self.w + 2 * self.pad_w - self.kw) // self.stride + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of the kernels' arguments."""
        return self.c, self.h, self.w, self.co, self.oh, self.ow, self.kh, self.kw, self.stride, self.pad_h, self.pad_w


class Tiles(NamedTuple):
    """What a program holds: m × n sums, k products of each at a time, `stages` of them on their way at once."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    pieces: int = 1             # of the positions, for the gradient of the weights


# Pass ("forward", "maps", "weights": what it computes) and layer -> how our kernel computes it. cuDNN has all that is not here.
TAKEN: dict[tuple[str, Layer], Tiles] = {
    ("forward", Layer(64, 8, 8, 64, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),             # layer1: 1.81 → 0.82
    ("maps", Layer(64, 8, 8, 64, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),                # layer1: 3.35 → 0.80
    ("weights", Layer(64, 8, 8, 64, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 4),             # layer1: 1.36 → 1.20
    ("forward", Layer(64, 8, 8, 128, 3, 3, 2, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),            # layer2.first: 0.82 → 0.55
    ("maps", Layer(64, 8, 8, 128, 3, 3, 2, 1, 1)): Tiles(64, 32, 64, 4, 3, 1),               # layer2.first: 2.75 → 0.78
    ("weights", Layer(64, 8, 8, 128, 3, 3, 2, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),            # layer2.first: 1.28 → 0.82
    ("forward", Layer(64, 8, 8, 128, 1, 1, 2, 0, 0)): Tiles(64, 16, 64, 4, 3, 1),            # layer2.short: 0.77 → 0.50
    ("maps", Layer(64, 8, 8, 128, 1, 1, 2, 0, 0)): Tiles(64, 32, 128, 4, 2, 1),              # layer2.short: 0.74 → 0.49
    ("weights", Layer(64, 8, 8, 128, 1, 1, 2, 0, 0)): Tiles(64, 64, 64, 4, 3, 4),            # layer2.short: 3.59 → 0.52
    ("forward", Layer(128, 4, 4, 128, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),           # layer2: 1.15 → 0.84
    ("maps", Layer(128, 4, 4, 128, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),              # layer2: 1.67 → 0.84
    ("weights", Layer(128, 4, 4, 128, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),           # layer2: 2.18 → 0.83
    ("forward", Layer(128, 4, 4, 256, 3, 3, 2, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),           # layer3.first: 0.95 → 0.68
    ("maps", Layer(128, 4, 4, 256, 3, 3, 2, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),              # layer3.first: 1.70 → 0.63
    ("weights", Layer(128, 4, 4, 256, 3, 3, 2, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),           # layer3.first: 3.23 → 0.54
    ("forward", Layer(128, 4, 4, 256, 1, 1, 2, 0, 0)): Tiles(64, 64, 64, 4, 3, 1),           # layer3.short: 0.85 → 0.25
    ("maps", Layer(128, 4, 4, 256, 1, 1, 2, 0, 0)): Tiles(64, 64, 64, 4, 3, 1),              # layer3.short: 0.81 → 0.32
    ("weights", Layer(128, 4, 4, 256, 1, 1, 2, 0, 0)): Tiles(64, 64, 64, 4, 3, 1),           # layer3.short: 0.66 → 0.30
    ("forward", Layer(256, 2, 2, 256, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),           # layer3: 1.25 → 0.67
    ("maps", Layer(256, 2, 2, 256, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 3, 1),              # layer3: 1.20 → 0.59
    ("weights", Layer(256, 2, 2, 256, 3, 3, 1, 1, 1)): Tiles(64, 64, 64, 4, 2, 1),           # layer3: 3.32 → 0.69
    ("forward", Layer(256, 2, 2, 512, 2, 2, 2, 0, 0)): Tiles(64, 64, 32, 4, 4, 1),           # layer4.first: 0.77 → 0.61
    ("maps", Layer(256, 2, 2, 512, 2, 2, 2, 0, 0)): Tiles(64, 64, 32, 4, 4, 1),              # layer4.first: 1.12 → 0.75
    ("weights", Layer(256, 2, 2, 512, 2, 2, 2, 0, 0)): Tiles(128, 64, 64, 4, 2, 1),          # layer4.first: 4.46 → 0.46
    ("forward", Layer(256, 2, 2, 512, 1, 1, 2, 0, 0)): Tiles(64, 32, 64, 4, 3, 1),           # layer4.short: 0.76 → 0.26
    ("maps", Layer(256, 2, 2, 512, 1, 1, 2, 0, 0)): Tiles(64, 64, 64, 4, 3, 1),              # layer4.short: 1.11 → 0.37
    ("weights", Layer(256, 2, 2, 512, 1, 1, 2, 0, 0)): Tiles(32, 32, 64, 4, 3, 1),           # layer4.short: 1.19 → 0.35
    ("forward", Layer(512, 1, 1, 512, 1, 1, 1, 0, 0)): Tiles(64, 16, 128, 4, 3, 1),          # layer4: 1.34 → 0.37
    ("maps", Layer(512, 1, 1, 512, 1, 1, 1, 0, 0)): Tiles(64, 32, 64, 4, 3, 1),              # layer4: 1.35 → 0.34
    ("weights", Layer(512, 1, 1, 512, 1, 1, 1, 0, 0)): Tiles(128, 64, 64, 4, 2, 1),          # layer4: 0.76 → 0.35
}
PASSES = "forward", "maps", "weights"
MOST_SAMPLES = 256              # measured at 64; batches that fill a GPU by themselves, as in scoring, are left to cuDNN
PROGRAMS, TURNS = 64, 8         # of the gradient of the weights: programs to have, if each then has this many turns of its loop


def usual_tiles(way: str, layer: Layer, samples: int) -> Tiles:
    """For layers that have not been measured: 64 × 64 × 64 or less, 48 KiB of shared memory."""
    side = lambda size: min(64, max(16, above(size)))
    if way == "forward":
        return Tiles(side(samples), side(layer.co), side(layer.c))
    if way == "maps":
        return Tiles(side(samples), side(layer.c), side(layer.co))
    m, n, k = side(layer.co), side(layer.c), side(samples)
    programs = layer.kh * layer.kw * -(-layer.co // m) * -(-layer.c // n)
    turns = layer.oh * layer.ow * -(-samples // k)
    return Tiles(m, n, k, pieces=max(1, min(PROGRAMS // programs, turns // TURNS)))


def taken(way: str, layer: Layer, samples: int) -> Tiles | None:
    """How our kernel computes this pass; None where cuDNN does."""
    return TAKEN.get((way, layer)) if samples <= MOST_SAMPLES else None


Ways = tuple["Tiles | None", "Tiles | None", "Tiles | None"]


def ways_of(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: Any, dilation: tuple[int, ...], groups: int
            ) -> tuple[Layer, Ways] | None:
    """The layer, and for each pass how our kernel computes it; None where cuDNN is to do all."""
    if triton is None or not x.is_cuda or torch.jit.is_tracing() or x.dim() != 4 or not len(x) or isinstance(padding, str):
        return None
    if groups != 1 or any(d != 1 for d in dilation) or stride[0] != stride[1] or x.shape[1] != weight.shape[1]:
        return None
    layer = Layer(*map(int, (*x.shape[1:], weight.shape[0], *weight.shape[2:], stride[0], *padding)))
    if layer.c % EVEN or layer.co % EVEN or min(layer.oh, layer.ow) < 1:
        return None
    samples = len(x)
    if max(samples * layer.h * layer.w * layer.c, samples * layer.oh * layer.ow * layer.co, weight.numel()) >= MOST_NUMBERS:
        return None
    ways = tuple(taken(way, layer, samples) for way in PASSES)
    return (layer, ways) if any(ways) else None                                                  # type: ignore[return-value]


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def forward(x: Tensor, weight: Tensor, layer: Layer, tiles: Tiles) -> Tensor:
    """The kernel alone, as the two below. All tensors lie with their channels side by side, without gaps."""
    n, (m, columns, k, warps, stages, _) = len(x), tiles
    out = torch.empty((n, layer.co, layer.oh, layer.ow), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    grid = layer.oh * layer.ow * triton.cdiv(n, m), triton.cdiv(layer.co, columns)
    with torch.cuda.device_of(x):
        _forward[grid](x, weight, out, n, *layer.sizes, BM=m, BN=columns, BK=k, WHOLE=n % m == 0, WIDE=WIDE,
                       num_warps=warps, num_stages=stages)
    return out


def maps_gradient(grad: Tensor, weight: Tensor, layer: Layer, tiles: Tiles) -> Tensor:
    n, (m, columns, k, warps, stages, _) = len(grad), tiles
    dx = torch.empty((n, layer.c, layer.h, layer.w), dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
    grid = layer.h * layer.w * triton.cdiv(n, m), triton.cdiv(layer.c, columns)
    with torch.cuda.device_of(grad):
        _maps[grid](grad, weight, dx, n, *layer.sizes, BM=m, BN=columns, BK=k, WHOLE=n % m == 0, WIDE=WIDE,
                    num_warps=warps, num_stages=stages)
    return dx


def weights_gradient(grad: Tensor, x: Tensor, weight: Tensor, layer: Layer, tiles: Tiles) -> Tensor:
    """Laid out as `weight` is."""
    n, (m, columns, k, warps, stages, pieces) = len(x), tiles
    dweight = torch.empty_like(weight)
    out = dweight if pieces == 1 else torch.empty((pieces, weight.numel()), dtype=torch.float32, device=x.device)
    grid = layer.kh * layer.kw * pieces, triton.cdiv(layer.co, m), triton.cdiv(layer.c, columns)
    with torch.cuda.device_of(x):
        _weights[grid](x, grad, out, n, *layer.sizes, BM=m, BN=columns, BK=k, PIECES=pieces, WHOLE=n % k == 0, WIDE=WIDE,
                       num_warps=warps, num_stages=stages)
        if pieces > 1:
            _add_up[(triton.cdiv(weight.numel(), ADDED),)](out, dweight, weight.numel(), pieces, ADDED, num_warps=4)
    return dweight


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer, ways: Ways) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.ways = layer, ways
        if ways[0] is not None:
            return forward(x, weight, layer, ways[0])
        return torch.conv2d(x, weight, None, layer.stride, (layer.pad_h, layer.pad_w))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), layer, (_, to_maps, to_weights) = ctx.saved_tensors, ctx.layer, ctx.ways
        g, (maps, weights, *_) = _last(grads[0]), ctx.needs_input_grad
        theirs = [maps and to_maps is None, weights and to_weights is None, False]
        dx = dweight = None
        if any(theirs):
            dx, dweight, _ = torch.ops.aten.convolution_backward(
                g, x, weight, None, [layer.stride] * 2, [layer.pad_h, layer.pad_w], [1, 1], False, [0, 0], 1, theirs)
        if maps and to_maps is not None:
            dx = maps_gradient(g, weight, layer, to_maps)
        if weights and to_weights is not None:
            dweight = weights_gradient(g, x, weight, layer, to_weights)
        return dx, dweight, None, None


def convolved(x: Tensor, weight: Tensor, layer: Layer, ways: Ways) -> Tensor:
    """The convolution, computed in bfloat16 as `ways_of` said."""
    return _Convolved.apply(_last(x.to(torch.bfloat16)), _last(weight.to(torch.bfloat16)), layer, ways)
