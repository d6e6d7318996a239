"""What FedFA's kernels have in common: the draws, and the formulas of one channel, whose samples' statistics are vectors over the batch."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    from ...kernels.hashing import fold_with, uniform_at
except ImportError:
    triton = None

SHARING = {"none": 0, "random": 0, "direct": 1, "per_channel": 2, "scalar": 2}


def above(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


if triton is not None:
    @triton.jit
    def step_seed(key, counter, word, COUNTED: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """`StepView.key`: the slot's key with the step's number folded in, where it is not yet, then the number of the words."""
        seed = tl.load(key)
        if COUNTED:
            seed = fold_with(seed, tl.load(counter), GOLDEN, MIX_1, MIX_2)
        return fold_with(seed, word, GOLDEN, MIX_1, MIX_2)

    @triton.jit
    def augmented(seed, chance, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """What the coin says; it is number 0 of the draw."""
        return uniform_at(seed, seed * 0, GOLDEN, MIX_1, MIX_2) < chance

    @triton.jit
    def _noise(seed, statistic, b, c, B, C, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """Standard normal numbers, one per sample."""
        at = 1 + (statistic * B + b).to(tl.int64) * C + c
        u = uniform_at(seed, at, GOLDEN, MIX_1, MIX_2)
        v = uniform_at(seed, at + 2 * B * C, GOLDEN, MIX_1, MIX_2)
        return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * v)

    @triton.jit
    def _factor(over, c, C, EPS: tl.constexpr, SHARED: tl.constexpr, CC: tl.constexpr):
        """Σ̂² over the variance in the batch, for one statistic of one channel; `over`: its variance over clients, all channels."""
        out = 1.0
        if SHARED == 1:
            out = tl.load(over + c) + 1.0
        if SHARED == 2:
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
    def jittered(mean, std, b, c, here, seed, over_mean, over_std, B, C, batch_divisor, EPS: tl.constexpr, SHARED: tl.constexpr,
                 FIXED: tl.constexpr, CC: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """The ratio σ̂/σ and the new mean of every sample, and the means of both statistics over the batch."""
        mean_all, _m, mean_wide = _spread(mean, here, _factor(over_mean, c, C, EPS, SHARED, CC), B, batch_divisor, EPS, FIXED)
        std_all, _s, std_wide = _spread(std, here, _factor(over_std, c, C, EPS, SHARED, CC), B, batch_divisor, EPS, FIXED)
        new_mean = mean + mean_wide * _noise(seed, 0, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        new_std = std + std_wide * _noise(seed, 1, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        return new_std / std, new_mean, mean_all, std_all

    @triton.jit
    def move(old_mean, old_std, old_left, moved_mean, moved_std, moved_left, mean_all, std_all, c, momentum, heads):
        """The momentum statistics of one channel after this step; they stay where the coin says no."""
        before = tl.load(old_mean + c)
        tl.store(moved_mean + c, tl.where(heads, before + (1.0 - momentum) * (mean_all - before), before))
        before = tl.load(old_std + c)
        tl.store(moved_std + c, tl.where(heads, before + (1.0 - momentum) * (std_all - before), before))
        left = tl.load(old_left)
        tl.store(moved_left, tl.where(heads, momentum * left, left))

    @triton.jit
    def way_back(mean, std, plain, d_ratio, b, c, here, seed, over_mean, over_std, B, C, batch_divisor,
                 EPS: tl.constexpr, SHARED: tl.constexpr, FIXED: tl.constexpr, CC: tl.constexpr,
                 GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """σ̂/σ, ∂μ and ∂σ of every sample. With S₁ = Σ_p g (`plain`), ∂r = Σ_p g·(x − μ), ratio r = σ̂/σ, ν the noise and
        Σ̂² = f·(V + ε), V over the batch of size B:

        ∂μ̂ = S₁, ∂σ̂ = ∂r/σ; ∂Σ̂ = Σ_b ∂(new)·ν and ∂V = ∂Σ̂·f/(2Σ̂), which reaches each statistic as 2(·−mean)/(B − c);
        ∂μ = S₁ − rS₁ + that, ∂σ = ∂σ̂ − ∂r·σ̂/σ² + that; then ∂x = g·r + ∂μ/P + ∂σ·(x − μ)/((P − c)σ).
        """
        f_mean, f_std = _factor(over_mean, c, C, EPS, SHARED, CC), _factor(over_std, c, C, EPS, SHARED, CC)
        _ma, mean_apart, mean_wide = _spread(mean, here, f_mean, B, batch_divisor, EPS, FIXED)
        _sa, std_apart, std_wide = _spread(std, here, f_std, B, batch_divisor, EPS, FIXED)
        mean_noise = _noise(seed, 0, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        std_noise = _noise(seed, 1, b, c, B, C, GOLDEN, MIX_1, MIX_2)
        new_std = std + std_wide * std_noise
        ratio = new_std / std
        d_new_std = d_ratio / std
        d_mean = plain - ratio * plain
        d_std = d_new_std - d_ratio * new_std / (std * std)
        if not FIXED:
            d_wide = tl.sum(tl.where(here, plain * mean_noise, 0.0), 0)
            d_mean += d_wide * f_mean / mean_wide * mean_apart / batch_divisor
            d_wide = tl.sum(tl.where(here, d_new_std * std_noise, 0.0), 0)
            d_std += d_wide * f_std / std_wide * std_apart / batch_divisor
        return ratio, d_mean, d_std
