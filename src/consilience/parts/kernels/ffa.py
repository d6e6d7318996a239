"""FedFA's layer in fused CUDA kernels; the formulas are those of `ffa`.

Written in tensor operations a stage launches about ninety small kernels in a step, more than the whole CNN it sits in. Here it is one
kernel forward and one backward where a batch's maps of a channel fit into the registers of one program, which serves that channel.
Larger maps take three each way (`ffa_large`), and so do those whose channels lie side by side, unless they are small: a program that
picks one channel out of them makes memory deliver the others too. The draws are those of `rng.uniform`, bit for bit, and their key is made
in the kernels too: three that fold one number each would take as long as the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.derivatives import first_order, transformed
from ...kernels.hashing import HASH_CONSTANTS
from ...tree import Tree
from . import ffa_large
from .ffa_draws import SHARING, above

try:
    import triton
    import triton.language as tl

    from .ffa_draws import augmented, jittered, move, step_seed, way_back
except ImportError:
    triton = None

Seed = tuple[Tensor, Tensor | None, int]           # a key, a number to fold in that lies on the device, and one that the host knows

LARGEST = 1 << 15           # values of a channel that one program can hold
PER_WARP = 1 << 8           # of them to a warp: more need more registers than there are, fewer make warps wait for each other
SMALL = 1 << 16             # values of a map up to which launching costs more than what memory delivers in vain
MOST_SAMPLES = 1 << 12      # whose statistics one program can hold


def usable(x: Tensor) -> bool:
    return (triton is not None and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and x.dim() == 4 and len(x) <= MOST_SAMPLES
            and x.numel() < 1 << 31 and not transformed())


def in_three(x: Tensor) -> bool:
    """Whether a map takes three kernels each way, not one."""
    b, _, h, w = x.shape
    return above(b) * above(h * w) > LARGEST or (not x.is_contiguous() and x.numel() > SMALL)


def warps(samples: int, positions: int) -> int:
    """Of a program that holds so many samples × positions, both powers of two."""
    return max(1, min(16, samples * positions // PER_WARP))


if triton is not None:
    @triton.jit
    def _forward(x, y, key, counter, over_mean, over_std, means, stds, old_mean, old_std, old_left, moved_mean, moved_std, moved_left,
                 momentum, word, B, C, P, x_b, x_c, x_p, map_divisor, batch_divisor, chance, COUNTED: tl.constexpr,
                 EPS: tl.constexpr, SHARED: tl.constexpr, FIXED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr, PP: tl.constexpr,
                 GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        c = tl.program_id(0)
        b, p = tl.arange(0, BB), tl.arange(0, PP)
        here, mask = b < B, (b < B)[:, None] & (p < P)[None, :]
        place = b[:, None] * x_b + c * x_c + p[None, :] * x_p
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(value, 1) / P
        apart = tl.where(mask, value - mean[:, None], 0.0)
        std = tl.sqrt(tl.sum(apart * apart, 1) / map_divisor + EPS)
        seed = step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        ratio, new_mean, mean_all, std_all = jittered(mean, std, b, c, here, seed, over_mean, over_std, B, C, batch_divisor,
                                                      EPS, SHARED, FIXED, CC, GOLDEN, MIX_1, MIX_2)
        heads = augmented(seed, chance, GOLDEN, MIX_1, MIX_2)
        new = value * ratio[:, None] + (new_mean - mean * ratio)[:, None]
        tl.store(y + place, tl.where(heads, new, value).to(y.dtype.element_ty), mask=mask)
        tl.store(means + b * C + c, mean, mask=here)
        tl.store(stds + b * C + c, std, mask=here)
        move(old_mean, old_std, old_left, moved_mean, moved_std, moved_left, mean_all, std_all, c, momentum, heads)

    @triton.jit
    def _backward(x, grad, out, key, counter, over_mean, over_std, means, stds,
                  word, B, C, P, x_b, x_c, x_p, map_divisor, batch_divisor, chance, COUNTED: tl.constexpr,
                  EPS: tl.constexpr, SHARED: tl.constexpr, FIXED: tl.constexpr, BB: tl.constexpr, CC: tl.constexpr, PP: tl.constexpr,
                  GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        c = tl.program_id(0)
        b, p = tl.arange(0, BB), tl.arange(0, PP)
        here, mask = b < B, (b < B)[:, None] & (p < P)[None, :]
        place = b[:, None] * x_b + c * x_c + p[None, :] * x_p
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(means + b * C + c, mask=here, other=0.0)
        std = tl.load(stds + b * C + c, mask=here, other=1.0)
        apart = value - mean[:, None]                     # where there is no number, g is 0
        seed = step_seed(key, counter, word, COUNTED, GOLDEN, MIX_1, MIX_2)
        ratio, d_mean, d_std = way_back(mean, std, tl.sum(g, 1), tl.sum(g * apart, 1), b, c, here, seed, over_mean, over_std, B, C,
                                        batch_divisor, EPS, SHARED, FIXED, CC, GOLDEN, MIX_1, MIX_2)
        moved = g * ratio[:, None] + (d_mean / P)[:, None] + apart * (d_std / (map_divisor * std))[:, None]
        heads = augmented(seed, chance, GOLDEN, MIX_1, MIX_2)
        tl.store(out + place, tl.where(heads, moved, g).to(out.dtype.element_ty), mask=mask)


def _geometry(x: Tensor, unbiased: bool) -> tuple[Any, ...]:
    """B, C, P, strides over sample, channel and position, and the divisors of both variances."""
    b, c, h, w = x.shape
    strides = (c * h * w, h * w, 1) if x.is_contiguous() else (c * h * w, 1, c)
    return b, c, h * w, *strides, float(h * w - unbiased), float(b - unbiased)


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Seed, over: Tree, old: Tree, left: Tensor, chance: float, momentum: float, sharing: str,
                unbiased: bool, eps: float) -> Any:
        if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
            x = x.contiguous()
        b, c, h, w = x.shape
        y, (means, stds) = torch.empty_like(x), left.new_empty(2, b, c).unbind()
        moved = torch.empty_like(old["mean"]), torch.empty_like(old["std"]), torch.empty_like(left)
        key, counter, word = seed
        ctx.how = (word, *_geometry(x, unbiased), chance, counter is not None, eps, SHARING[sharing], sharing == "random", above(b),
                   above(c), above(h * w), *HASH_CONSTANTS)
        ctx.warps = warps(above(b), above(h * w))
        ctx.large = in_three(x)
        counter = key if counter is None else counter
        given = (x, y, key, counter, over["mean"], over["std"], means, stds, old["mean"], old["std"], left, *moved, momentum, *ctx.how)
        with torch.cuda.device_of(x):
            if ctx.large:
                ffa_large.forward(*given)
            else:
                _forward[(c,)](*given, num_warps=ctx.warps)
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
        given = (x, grad, out, *ctx.seed, *others, *ctx.how)
        with torch.cuda.device_of(x):
            if ctx.large:
                ffa_large.backward(*given)
            else:
                _backward[(x.shape[1],)](*given, num_warps=ctx.warps)
        return out, *[None] * 9


def jitter(x: Tensor, seed: Seed, over: Tree, old: Tree, left: Tensor, chance: float, momentum: float, sharing: str, unbiased: bool,
           eps: float) -> tuple[Tensor, Tree]:
    """What `Ffa.tap` returns. over: variance over clients; old, left: momentum statistics before this step."""
    y, mean, std, rest = _Jitter.apply(x, seed, over, old, left, chance, momentum, sharing, unbiased, eps)
    return y, {"stats": {"mean": mean, "std": std}, "left": rest}
