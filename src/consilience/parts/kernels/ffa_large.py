"""FedFA's layer on maps of which no program can hold a channel: three kernels forward and three backward.

The first of each has a program for some channels of one sample and sums over its positions; the second has one for each channel and
works out, from the sums of all samples, by what every sample's map is stretched and moved; the third does that. Where the coin says
that nothing is augmented, only the third reads a map: the first leaves its results as they are, and of what the second makes of them
nothing is used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .ffa_draws import above

try:
    import triton
    import triton.language as tl

    from .ffa_draws import augmented, jittered, move, step_seed, way_back
except ImportError:
    triton = None

TILE = 1 << 12              # numbers a program holds at once
SIDE = 1 << 5               # channels of a program where they lie side by side: what memory delivers at once, in float32

if triton is not None:
    @triton.jit
    def _tile(start, c, C, P, LAST: tl.constexpr, ROWS: tl.constexpr):
        """Where the numbers of `ROWS` positions of channels c lie in a sample's map, and which of them are there."""
        p = start + tl.arange(0, ROWS)
        if LAST:
            place = p[:, None] * C + c[None, :]
        else:
            place = p[:, None] + c[None, :] * P
        return place, (p < P)[:, None] & (c < C)[None, :]

    @triton.jit
    def _moments(x, means, stds, key, counter, word, C, P, map_divisor, chance, COUNTED: tl.constexpr, EPS: tl.constexpr,
                 LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                 GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """Mean and standard deviation of each channel of one sample."""
        b, c = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
        if augmented(step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2), chance, GOLDEN, MIX_1, MIX_2):
            own = x + b.to(tl.int64) * C * P
            total = tl.zeros((ROWS, COLS), tl.float32)
            for start in range(0, P, ROWS):
                place, mask = _tile(start, c, C, P, LAST, ROWS)
                total += tl.load(own + place, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(total, 0) / P
            total = tl.zeros((ROWS, COLS), tl.float32)
            for start in range(0, P, ROWS):
                place, mask = _tile(start, c, C, P, LAST, ROWS)
                apart = tl.where(mask, tl.load(own + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :], 0.0)
                total += apart * apart
            tl.store(means + b * C + c, mean, mask=c < C)
            tl.store(stds + b * C + c, tl.sqrt(tl.sum(total, 0) / map_divisor + EPS), mask=c < C)

    @triton.jit
    def _draw(stretch, shift, key, counter, over_mean, over_std, means, stds, old_mean, old_std, old_left, moved_mean, moved_std,
              moved_left, momentum, word, B, C, batch_divisor, chance, COUNTED: tl.constexpr, EPS: tl.constexpr, SHARED: tl.constexpr,
              FIXED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """What one channel of every sample is multiplied by, and what is added to it."""
        c, b = tl.program_id(0), tl.arange(0, BB)
        here, place = b < B, b * C + c
        seed = step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        heads = augmented(seed, chance, GOLDEN, MIX_1, MIX_2)
        mean, std = tl.load(means + place, mask=here, other=0.0), tl.load(stds + place, mask=here, other=1.0)
        ratio, new_mean, mean_all, std_all = jittered(mean, std, b, c, here, seed, over_mean, over_std, B, C, batch_divisor,
                                                      EPS, SHARED, FIXED, CC, GOLDEN, MIX_1, MIX_2)
        tl.store(stretch + place, ratio, mask=here)
        tl.store(shift + place, new_mean - mean * ratio, mask=here)
        move(old_mean, old_std, old_left, moved_mean, moved_std, moved_left, mean_all, std_all, c, momentum, heads)

    @triton.jit
    def _apply(x, y, stretch, shift, key, counter, word, C, P, chance, COUNTED: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr,
               COLS: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        b, c = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
        place, mask = _tile(tl.program_id(2) * ROWS, c, C, P, LAST, ROWS)
        own = b.to(tl.int64) * C * P
        value = tl.load(x + own + place, mask=mask, other=0.0).to(tl.float32)
        if augmented(step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2), chance, GOLDEN, MIX_1, MIX_2):
            by = tl.load(stretch + b * C + c, mask=c < C, other=0.0)
            value = value * by[None, :] + tl.load(shift + b * C + c, mask=c < C, other=0.0)[None, :]
        tl.store(y + own + place, value.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _sums(x, grad, plain, turned, means, key, counter, word, C, P, chance, COUNTED: tl.constexpr, LAST: tl.constexpr,
              ROWS: tl.constexpr, COLS: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """Σ g and Σ g·(x − μ) of each channel of one sample."""
        b, c = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
        if augmented(step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2), chance, GOLDEN, MIX_1, MIX_2):
            own = b.to(tl.int64) * C * P
            mean = tl.load(means + b * C + c, mask=c < C, other=0.0)
            one, two = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
            for start in range(0, P, ROWS):
                place, mask = _tile(start, c, C, P, LAST, ROWS)
                g = tl.load(grad + own + place, mask=mask, other=0.0).to(tl.float32)
                one += g
                two += g * (tl.load(x + own + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :])
            tl.store(plain + b * C + c, tl.sum(one, 0), mask=c < C)
            tl.store(turned + b * C + c, tl.sum(two, 0), mask=c < C)

    @triton.jit
    def _weigh(plain, turned, ratios, lifts, tilts, key, counter, over_mean, over_std, means, stds, word, B, C, P, map_divisor,
               batch_divisor, COUNTED: tl.constexpr, EPS: tl.constexpr, SHARED: tl.constexpr, FIXED: tl.constexpr,
               BB: tl.constexpr, CC: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """What the gradient of one channel of every sample is made of: r, ∂μ/P and ∂σ/((P − c)σ)."""
        c, b = tl.program_id(0), tl.arange(0, BB)
        here, place = b < B, b * C + c
        seed = step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        mean, std = tl.load(means + place, mask=here, other=0.0), tl.load(stds + place, mask=here, other=1.0)
        one, two = tl.load(plain + place, mask=here, other=0.0), tl.load(turned + place, mask=here, other=0.0)
        ratio, d_mean, d_std = way_back(mean, std, one, two, b, c, here, seed, over_mean, over_std, B, C, batch_divisor,
                                        EPS, SHARED, FIXED, CC, GOLDEN, MIX_1, MIX_2)
        tl.store(ratios + place, ratio, mask=here)
        tl.store(lifts + place, d_mean / P, mask=here)
        tl.store(tilts + place, d_std / (map_divisor * std), mask=here)

    @triton.jit
    def _apply_back(x, grad, out, ratios, lifts, tilts, means, key, counter, word, C, P, chance, COUNTED: tl.constexpr,
                    LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                    GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        b, c = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
        place, mask = _tile(tl.program_id(2) * ROWS, c, C, P, LAST, ROWS)
        own, here = b.to(tl.int64) * C * P, c < C
        g = tl.load(grad + own + place, mask=mask, other=0.0).to(tl.float32)
        if augmented(step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2), chance, GOLDEN, MIX_1, MIX_2):
            at = b * C + c
            apart = tl.load(x + own + place, mask=mask, other=0.0).to(tl.float32) - tl.load(means + at, mask=here, other=0.0)[None, :]
            g = g * tl.load(ratios + at, mask=here, other=0.0)[None, :] + tl.load(lifts + at, mask=here, other=0.0)[None, :]
            g += apart * tl.load(tilts + at, mask=here, other=0.0)[None, :]
        tl.store(out + own + place, g.to(out.dtype.element_ty), mask=mask)


class _Plan:
    """How the programs of the first and the third kernel divide the maps among them."""

    def __init__(self, C: int, P: int, x_c: int) -> None:
        self.last = x_c == 1 and C > 1
        self.cols = min(above(C), SIDE) if self.last else 1
        self.rows = min(above(P), TILE // self.cols)
        self.channels, self.pieces = -(-C // self.cols), -(-P // self.rows)
        self.how = {"LAST": self.last, "ROWS": self.rows, "COLS": self.cols, "num_warps": max(1, min(8, self.rows * self.cols // 512))}


def forward(x: Tensor, y: Tensor, key: Tensor, counter: Tensor, over_mean: Tensor, over_std: Tensor, means: Tensor, stds: Tensor,
            old_mean: Tensor, old_std: Tensor, left: Tensor, moved_mean: Tensor, moved_std: Tensor, moved_left: Tensor, momentum: float,
            word: int, B: int, C: int, P: int, x_b: int, x_c: int, x_p: int, map_divisor: float, batch_divisor: float, chance: float,
            counted: bool, eps: float, shared: int, fixed: bool, bb: int, cc: int, pp: int, *constants: int) -> None:
    plan, stretch, shift = _Plan(C, P, x_c), means.new_empty(B, C), means.new_empty(B, C)
    mix: dict[str, Any] = dict(zip(("GOLDEN", "MIX_1", "MIX_2"), constants)) | {"COUNTED": counted}
    _moments[B, plan.channels](x, means, stds, key, counter, word, C, P, map_divisor, chance, EPS=eps, **mix, **plan.how)
    _draw[(C,)](stretch, shift, key, counter, over_mean, over_std, means, stds, old_mean, old_std, left, moved_mean, moved_std, moved_left,
                momentum, word, B, C, batch_divisor, chance, EPS=eps, SHARED=shared, FIXED=fixed, BB=bb, CC=cc, **mix)
    _apply[B, plan.channels, plan.pieces](x, y, stretch, shift, key, counter, word, C, P, chance, **mix, **plan.how)


def backward(x: Tensor, grad: Tensor, out: Tensor, key: Tensor, counter: Tensor, over_mean: Tensor, over_std: Tensor, means: Tensor,
             stds: Tensor, word: int, B: int, C: int, P: int, x_b: int, x_c: int, x_p: int, map_divisor: float, batch_divisor: float,
             chance: float, counted: bool, eps: float, shared: int, fixed: bool, bb: int, cc: int, pp: int, *constants: int) -> None:
    plan, room = _Plan(C, P, x_c), means.new_empty(5, B, C)
    plain, turned, *made = room.unbind()
    mix: dict[str, Any] = dict(zip(("GOLDEN", "MIX_1", "MIX_2"), constants)) | {"COUNTED": counted}
    _sums[B, plan.channels](x, grad, plain, turned, means, key, counter, word, C, P, chance, **mix, **plan.how)
    _weigh[(C,)](plain, turned, *made, key, counter, over_mean, over_std, means, stds, word, B, C, P, map_divisor, batch_divisor,
                 EPS=eps, SHARED=shared, FIXED=fixed, BB=bb, CC=cc, **mix)
    _apply_back[B, plan.channels, plan.pieces](x, grad, out, *made, means, key, counter, word, C, P, chance, **mix, **plan.how)
