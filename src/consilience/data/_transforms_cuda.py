"""The usual way of a batch into a model, [crop] → [flip] → [normalise], as one CUDA kernel; numbers are those of `transforms`.

In tensor operations it takes about forty small kernels, as many as a small CNN needs for a whole step. The draws are those of
`rng.uniform`, bit for bit. Whatever else a pipeline holds runs as written in `transforms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import rng

try:
    import triton
    import triton.language as tl

    from .._rng_cuda import uniform_at
except ImportError:
    triton = None

BLOCK = 1024
CHANNELS = 4                # means and deviations travel as arguments


if triton is not None:
    @triton.jit
    def _shift(u, PAD: tl.constexpr):
        """A whole number −PAD … PAD from a number in (0, 1)."""
        return tl.minimum((u * (2 * PAD + 1)).to(tl.int64), 2 * PAD) - PAD

    @triton.jit
    def _mirror(at, size):
        return (size - 1) - tl.abs((size - 1) - tl.abs(at))

    @triton.jit
    def _kernel(x, out, key, n, B, C, H, W, m0, m1, m2, m3, s0, s1, s2, s3, chance, CROP: tl.constexpr, PAD: tl.constexpr,
                REFLECT: tl.constexpr, FLIP: tl.constexpr, NORMALISE: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
                GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        w, h, c, b = i % W, (i // W) % H, (i // (W * H)) % C, i // (W * H * C)
        seed = tl.load(key)
        from_h, from_w = h.to(tl.int64), w.to(tl.int64)
        inside = mask
        if FLIP:                                       # the flip comes after the crop, so going back it comes first
            heads = uniform_at(seed, 2 * CROP * B + b, GOLDEN, MIX_1, MIX_2) < chance
            from_w = tl.where(heads, W - 1 - from_w, from_w)
        if CROP:
            from_h += _shift(uniform_at(seed, b, GOLDEN, MIX_1, MIX_2), PAD)
            from_w += _shift(uniform_at(seed, B + b, GOLDEN, MIX_1, MIX_2), PAD)
            if REFLECT:
                from_h, from_w = _mirror(from_h, H), _mirror(from_w, W)
            else:
                inside = mask & (from_h >= 0) & (from_h < H) & (from_w >= 0) & (from_w < W)
        value = tl.load(x + ((b * C + c) * H + from_h) * W + from_w, mask=inside, other=0).to(tl.float32)
        if BYTES:
            value = tl.div_rn(value, 255.0)
        if NORMALISE:
            mean = tl.where(c == 0, m0, tl.where(c == 1, m1, tl.where(c == 2, m2, m3)))
            std = tl.where(c == 0, s0, tl.where(c == 1, s1, tl.where(c == 2, s2, s3)))
            value = tl.div_rn(value - mean, std)
        tl.store(out + i, value, mask=mask)


def usable(x: Tensor) -> bool:
    return (triton is not None and x.is_cuda and x.dim() == 4 and x.shape[1] <= CHANNELS and x.is_contiguous()
            and x.dtype in (torch.uint8, torch.float32) and 0 < x.numel() < 1 << 31)


def run(x: Tensor, key: Tensor, pad: int, reflect: bool, flip: float | None, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """pad 0: no crop; flip None: no flip; no mean: no normalisation. With neither crop nor flip the key is not looked at."""
    b, c, h, w = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    four = lambda values, rest: [*(values * c if len(values) == 1 else values), *[rest] * CHANNELS][:CHANNELS]
    with torch.cuda.device_of(x):
        _kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, key, x.numel(), b, c, h, w, *four(mean, 0.0), *four(std, 1.0), flip or 0.0,
                                                  int(pad > 0), pad, reflect, flip is not None, bool(mean), x.dtype == torch.uint8, BLOCK,
                                                  *rng.HASH_CONSTANTS)
    return out
