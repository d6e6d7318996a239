"""FedFA's layer as one fused CUDA kernel forward and one backward; the formulas are those of `ffa`.

Written in tensor operations a stage launches about ninety small kernels in a step, more than the whole CNN it sits in. Here one program
serves one channel: a batch's maps of a channel fit into registers. The draws are those of `rng.uniform`, bit for bit, and their key is
made here too: three kernels that fold one number each would take as long as the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..core._once import first_order
from ..core.step_view import Unfolded
from ..tree import Tree

try:
    import triton
    import triton.language as tl

    from .._rng_cuda import fold_with, uniform_at
except ImportError:
    triton = None

LARGEST = 1 << 15           # values of a channel that one program can hold
PER_WARP = 1 << 8           # of them to a warp: more need more registers than there are, fewer make warps wait for each other
_SHARING = {"none": 0, "random": 0, "direct": 1, "per_channel": 2, "scalar": 2}


def usable(x: Tensor) -> bool:
    if triton is None or not x.is_cuda or x.dtype != torch.float32 or x.dim() != 4:
        return False
    return _above(len(x)) * _above(x.shape[2] * x.shape[3]) <= LARGEST


def _above(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def warps(samples: int, positions: int) -> int:
    """Of a program that holds so many samples × positions, both powers of two."""
    return max(1, min(16, samples * positions // PER_WARP))


if triton is not None:
    @triton.jit
    def _seed(key, counter, word, COUNTED: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """`StepView.key`: the slot's key with the step's number folded in, where it is not yet, then the number of the words."""
        seed = tl.load(key)
        if COUNTED:
            seed = fold_with(seed, tl.load(counter), GOLDEN, MIX_1, MIX_2)
        return fold_with(seed, word, GOLDEN, MIX_1, MIX_2)

    @triton.jit
    def _noise(key, statistic, b, c, B, C, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """Standard normal numbers, one per sample; number 0 of the draw is the coin."""
        at = 1 + (statistic * B + b).to(tl.int64) * C + c
        u = uniform_at(key, at, GOLDEN, MIX_1, MIX_2)
        v = uniform_at(key, at + 2 * B * C, GOLDEN, MIX_1, MIX_2)
        return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * v)

    @triton.jit
    def _factor(over, c, C, EPS: tl.constexpr, SHARING: tl.constexpr, CC: tl.constexpr):
        """Σ̂² over the variance in the batch, for one statistic of one channel; `over`: its variance over clients, all channels."""
        out = 1.0
        if SHARING == 1:
            out = tl.load(over + c) + 1.0
        if SHARING == 2:
            at = tl.arange(0, CC)
            r = 1.0 / (1.0 + 1.0 / (tl.load(over + at, mask=at < C, other=1.0) + EPS))
            mine = 1.0 / (1.0 + 1.0 / (tl.load(over + c) + EPS))
            out = mine * (C / tl.sum(tl.where(at < C, r, 0.0), 0)) + 1.0
        return out

    @triton.jit
    def _spread(value, here, factor, B, batch_divisor, EPS: tl.constexpr, FIXED: tl.constexpr):
        """Mean over the batch, deviations from it, and Σ̂."""
        middle = tl.sum(tl.where(here, value, 0.0), 0) / B
        apart = tl.where(here, value - middle, 0.0)
        wide = tl.sqrt(factor * (tl.sum(apart * apart, 0) / batch_divisor + EPS))
        if FIXED:
            wide = 0.5
        return middle, apart, wide

    @triton.jit
    def _forward(x, y, key, counter, over_mean, over_std, means, stds, old_mean, old_std, old_left, moved_mean, moved_std, moved_left,
                 momentum, word, B, C, P, x_b, x_c, x_p, map_divisor, batch_divisor, chance, COUNTED: tl.constexpr,
                 EPS: tl.constexpr, SHARING: tl.constexpr, FIXED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr, PP: tl.constexpr,
                 GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        c = tl.program_id(0)
        b, p = tl.arange(0, BB), tl.arange(0, PP)
        here, mask = b < B, (b < B)[:, None] & (p < P)[None, :]
        place = b[:, None] * x_b + c * x_c + p[None, :] * x_p
        value = tl.load(x + place, mask=mask, other=0.0)
        mean = tl.sum(value, 1) / P
        apart = tl.where(mask, value - mean[:, None], 0.0)
        std = tl.sqrt(tl.sum(apart * apart, 1) / map_divisor + EPS)
        seed = _seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        mean_all, _m, mean_wide = _spread(mean, here, _factor(over_mean, c, C, EPS, SHARING, CC), B, batch_divisor, EPS, FIXED)
        std_all, _s, std_wide = _spread(std, here, _factor(over_std, c, C, EPS, SHARING, CC), B, batch_divisor, EPS, FIXED)
        new_mean = mean + mean_wide * _noise(seed, 0, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        new_std = std + std_wide * _noise(seed, 1, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        ratio = new_std / std
        heads = uniform_at(seed, seed * 0, GOLDEN, MIX_1, MIX_2) < chance
        jittered = value * ratio[:, None] + (new_mean - mean * ratio)[:, None]
        tl.store(y + place, tl.where(heads, jittered, value), mask=mask)
        tl.store(means + b * C + c, mean, mask=here)
        tl.store(stds + b * C + c, std, mask=here)
        rate = tl.where(heads, 1.0 - momentum, 0.0)
        before = tl.load(old_mean + c)
        tl.store(moved_mean + c, before + rate * (mean_all - before))
        before = tl.load(old_std + c)
        tl.store(moved_std + c, before + rate * (std_all - before))
        left = tl.load(old_left)
        tl.store(moved_left, tl.where(heads, momentum * left, left))

    @triton.jit
    def _backward(x, grad, out, key, counter, over_mean, over_std, means, stds,
                  word, B, C, P, x_b, x_c, x_p, map_divisor, batch_divisor, chance, COUNTED: tl.constexpr,
                  EPS: tl.constexpr, SHARING: tl.constexpr, FIXED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr, PP: tl.constexpr,
                  GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """With S₁ = Σ_p g and S₂ = Σ_p g·x of a sample, ratio r = σ̂/σ, ν the noise and Σ̂² = f·(V + ε), V over the batch of size B:

        ∂r = S₂ − μS₁, ∂μ̂ = S₁, ∂σ̂ = ∂r/σ; ∂Σ̂ = Σ_b ∂(new)·ν and ∂V = ∂Σ̂·f/(2Σ̂), which reaches each statistic as 2(·−mean)/(B − c);
        ∂μ = S₁ − rS₁ + that, ∂σ = ∂σ̂ − ∂r·σ̂/σ² + that; ∂x = g·r + ∂μ/P + ∂σ·(x − μ)/((P − c)σ).
        """
        c = tl.program_id(0)
        b, p = tl.arange(0, BB), tl.arange(0, PP)
        here, mask = b < B, (b < B)[:, None] & (p < P)[None, :]
        place = b[:, None] * x_b + c * x_c + p[None, :] * x_p
        value, g = tl.load(x + place, mask=mask, other=0.0), tl.load(grad + place, mask=mask, other=0.0)
        mean = tl.load(means + b * C + c, mask=here, other=0.0)
        std = tl.load(stds + b * C + c, mask=here, other=1.0)
        seed = _seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        f_mean, f_std = _factor(over_mean, c, C, EPS, SHARING, CC), _factor(over_std, c, C, EPS, SHARING, CC)
        _ma, mean_apart, mean_wide = _spread(mean, here, f_mean, B, batch_divisor, EPS, FIXED)
        _sa, std_apart, std_wide = _spread(std, here, f_std, B, batch_divisor, EPS, FIXED)
        mean_noise = _noise(seed, 0, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        std_noise = _noise(seed, 1, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        new_std = std + std_wide * std_noise
        ratio = new_std / std
        s1, s2 = tl.sum(g, 1), tl.sum(g * value, 1)
        d_ratio = s2 - mean * s1
        d_new_std = d_ratio / std
        d_mean = s1 - ratio * s1
        d_std = d_new_std - d_ratio * new_std / (std * std)
        if not FIXED:
            d_wide = tl.sum(tl.where(here, s1 * mean_noise, 0.0), 0)
            d_mean += d_wide * f_mean / mean_wide * mean_apart / batch_divisor
            d_wide = tl.sum(tl.where(here, d_new_std * std_noise, 0.0), 0)
            d_std += d_wide * f_std / std_wide * std_apart / batch_divisor
        moved = g * ratio[:, None] + (d_mean / P)[:, None] + (value - mean[:, None]) * (d_std / (map_divisor * std))[:, None]
        heads = uniform_at(seed, seed * 0, GOLDEN, MIX_1, MIX_2) < chance
        tl.store(out + place, tl.where(heads, moved, g), mask=mask)


def _geometry(x: Tensor, unbiased: bool) -> tuple[Any, ...]:
    """B, C, P, strides over sample, channel and position, and the divisors of both variances."""
    b, c, h, w = x.shape
    strides = (c * h * w, h * w, 1) if x.is_contiguous() else (c * h * w, 1, c)
    return b, c, h * w, *strides, float(h * w - unbiased), float(b - unbiased)


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Unfolded, over: Tree, old: Tree, left: Tensor, chance: float, momentum: float, sharing: str,
                unbiased: bool, eps: float) -> Any:
        if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
            x = x.contiguous()
        b, c, h, w = x.shape
        y, means, stds = torch.empty_like(x), x.new_empty(b, c), x.new_empty(b, c)
        moved = torch.empty_like(old["mean"]), torch.empty_like(old["std"]), torch.empty_like(left)
        key, counter, word = seed
        ctx.how = (word, *_geometry(x, unbiased), chance, counter is not None, eps, _SHARING[sharing], sharing == "random", _above(b),
                   _above(c), _above(h * w), *rng.HASH_CONSTANTS)
        ctx.warps = warps(_above(b), _above(h * w))
        counter = key if counter is None else counter
        with torch.cuda.device_of(x):
            _forward[(c,)](x, y, key, counter, over["mean"], over["std"], means, stds, old["mean"], old["std"], left, *moved, momentum,
                           *ctx.how, num_warps=ctx.warps)
        ctx.save_for_backward(x, over["mean"], over["std"], means, stds)
        ctx.seed = key, counter           # not saved: the counter moves on after the way back, and saving it would forbid that
        ctx.mark_non_differentiable(*moved)
        ctx.set_materialize_grads(False)                  # zeros for the statistics would be three more kernels
        return y, *moved

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        like = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        grad, out = grads[0].contiguous(memory_format=like), torch.empty_like(x)
        with torch.cuda.device_of(x):
            _backward[(x.shape[1],)](x, grad, out, *ctx.seed, *others, *ctx.how, num_warps=ctx.warps)
        return out, *[None] * 9


def jitter(x: Tensor, seed: Unfolded, over: Tree, old: Tree, left: Tensor, chance: float, momentum: float, sharing: str, unbiased: bool,
           eps: float) -> tuple[Tensor, Tree]:
    """What `Ffa.tap` returns. over: variance over clients; old, left: momentum statistics before this step."""
    y, mean, std, rest = _Jitter.apply(x, seed, over, old, left, chance, momentum, sharing, unbiased, eps)
    return y, {"stats": {"mean": mean, "std": std}, "left": rest}
