"""The hash of `rng` as two fused CUDA kernels, bit for bit the same.

Written in tensor operations a key takes thirteen small kernels and a draw about thirty; inside a captured step those, not the model,
would be most of what small models launch. Used for CUDA tensors where Triton is installed; elsewhere `rng` does without.
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

HASH_CONSTANTS = tuple(bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # SplitMix64's, as int64
BLOCK = 1024
MOST_KEYS = (1 << 16) - 1    # that one launch can draw for

if triton is not None:
    @triton.jit
    def _mix(x, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    @triton.jit
    def uniform_at(key, i, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """Number i of the draw, for kernels that draw for themselves."""
        x = _mix(key + (i.to(tl.int64) + 1) * GOLDEN, MIX_1, MIX_2)
        return (((x >> 41) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07

    @triton.jit
    def fold_with(key, number, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        """`rng.fold`, for kernels that make keys for themselves."""
        return _mix(key * GOLDEN + number, MIX_1, MIX_2)

    @triton.jit
    def _fold_kernel(key, number, out, host_number, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
                     ON_DEVICE: tl.constexpr):
        add = host_number
        if ON_DEVICE:
            add = tl.load(number)
        tl.store(out, fold_with(tl.load(key), add, GOLDEN, MIX_1, MIX_2))

    @triton.jit
    def _bits_kernel(key, out, n, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, UNIFORM: tl.constexpr,
                     BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        own = tl.program_id(1)                               # which of the keys
        seed, to = tl.load(key + own), out + own.to(tl.int64) * n + i
        if UNIFORM:
            tl.store(to, uniform_at(seed, i, GOLDEN, MIX_1, MIX_2), mask=i < n)
        else:
            tl.store(to, _mix(seed + (i + 1) * GOLDEN, MIX_1, MIX_2), mask=i < n)


def usable(keys: Tensor) -> bool:
    """Whether the kernels can read these keys: they lie on a GPU, one beside the other, and no vmap stands before them."""
    return (triton is not None and keys.is_cuda and not torch._C._functorch.is_batchedtensor(keys) and keys.is_contiguous()
            and keys.numel() <= MOST_KEYS)


def folds(key: Tensor, number: int | Tensor) -> bool:
    """Whether `fold` can: it makes one key, of one key and one number that the host knows or that lies where the key does."""
    if key.dim() or not usable(key):
        return False
    return isinstance(number, int) or (number.dim() == 0 and number.device == key.device and not number.is_floating_point()
                                       and not torch._C._functorch.is_batchedtensor(number))


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    out = torch.empty_like(key)
    on_device = isinstance(number, Tensor)
    with torch.cuda.device_of(key):
        _fold_kernel[(1,)](key, number if on_device else key, out, 0 if on_device else number, *HASH_CONSTANTS, on_device)
    return out


def draw(key: Tensor, n: int, uniform: bool) -> Tensor:
    """n numbers for a key; a row of them for each of several keys."""
    out = torch.empty((*key.shape, n), dtype=torch.float32 if uniform else torch.int64, device=key.device)
    if out.numel():
        grid: Any = ((n + BLOCK - 1) // BLOCK, key.numel())
        with torch.cuda.device_of(key):
            _bits_kernel[grid](key, out, n, *HASH_CONSTANTS, uniform, BLOCK)
    return out
