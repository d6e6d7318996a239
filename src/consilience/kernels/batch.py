"""The usual way of a batch into a model, [crop] → [flip] → [normalise], as one CUDA kernel; numbers are those of `transforms`.

In tensor operations it takes about forty small kernels, as many as a small CNN needs for a whole step. The draws are those of
`rng.uniform`, bit for bit. Whatever else a pipeline holds runs as written in `transforms`. In a step the same kernel also picks the
batch's rows, by a counter on the device, makes the key of its draws, and brings the labels along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .hashing import HASH_CONSTANTS

try:
    import triton
    import triton.language as tl

    from .hashing import fold_with, uniform_at
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
    def _kernel(x, out, key, y, out_y, index, counter, n, B, C, H, W, width, m0, m1, m2, m3, s0, s1, s2, s3, chance, word,
                CROP: tl.constexpr, PAD: tl.constexpr, REFLECT: tl.constexpr, FLIP: tl.constexpr, NORMALISE: tl.constexpr,
                BYTES: tl.constexpr, DRAWS: tl.constexpr, GATHER: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
                GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        if LAST:                                       # channels lie next to each other
            c, w, h = i % C, (i // C) % W, (i // (C * W)) % H
        else:
            w, h, c = i % W, (i // W) % H, (i // (W * H)) % C
        b = i // (W * H * C)
        row = b.to(tl.int64)
        if DRAWS:
            seed = tl.load(key)
        if GATHER:
            step = tl.load(counter)
            own = index + step * width
            row = tl.load(own + b, mask=mask, other=0)
            labelled = i < B                           # only the first programs have any of these
            which = tl.load(own + i, mask=labelled, other=0)
            tl.store(out_y + i, tl.load(y + which, mask=labelled, other=0).to(tl.int64), mask=labelled)
            if DRAWS:                                  # the step's key, and twice the word that the tensor operations fold in
                seed = fold_with(seed, step, GOLDEN, MIX_1, MIX_2)
                seed = fold_with(fold_with(seed, word, GOLDEN, MIX_1, MIX_2), word, GOLDEN, MIX_1, MIX_2)
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
        value = tl.load(x + ((row * C + c) * H + from_h) * W + from_w, mask=inside, other=0).to(tl.float32)
        if BYTES:
            value = tl.div_rn(value, 255.0)
        if NORMALISE:
            mean = tl.where(c == 0, m0, tl.where(c == 1, m1, tl.where(c == 2, m2, m3)))
            std = tl.where(c == 0, s0, tl.where(c == 1, s1, tl.where(c == 2, s2, s3)))
            value = tl.div_rn(value - mean, std)
        tl.store(out + i, value, mask=mask)


class Usual(NamedTuple):
    """pad 0: no crop; flip None: no flip; no mean: no normalisation. With neither crop nor flip the key is not looked at."""

    pad: int
    reflect: bool
    flip: float | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def draws(self) -> bool:
        return self.pad > 0 or self.flip is not None


class Source(NamedTuple):
    """Where a step's batch comes from: row `counter` of `order` says which samples, and `y` holds their labels."""

    y: Tensor
    order: Tensor
    counter: Tensor
    word: int                # the number of the word that keys of transforms are made with


def usable(x: Tensor, samples: int | None = None) -> bool:
    """Whether the kernel knows such inputs; `samples` of them where they are to be picked out."""
    picked = x.numel() if samples is None else samples * x[:1].numel()
    return (triton is not None and x.is_cuda and x.dim() == 4 and x.shape[1] <= CHANNELS and x.is_contiguous()
            and x.dtype in (torch.uint8, torch.float32) and 0 < picked < 1 << 31)


def run(x: Tensor, key: Tensor, what: Usual) -> Tensor:
    """The batch x, transformed."""
    return _launch(x, len(x), key, what, None, False)[0]


def gather(x: Tensor, samples: int, key: Tensor, what: Usual, source: Source, channels_last: bool) -> tuple[Tensor, Tensor]:
    """`samples` of x, transformed, and their labels."""
    return _launch(x, samples, key, what, source, channels_last)


def _launch(x: Tensor, b: int, key: Tensor, what: Usual, source: Source | None, last: bool) -> tuple[Tensor, Tensor]:
    _, c, h, w = x.shape
    out = torch.empty((b, c, h, w), dtype=torch.float32, device=x.device,             # one channel: only the strides differ
                      memory_format=torch.channels_last if last else torch.contiguous_format)
    y = torch.empty(b if source else 0, dtype=torch.int64, device=x.device)
    four = lambda values, rest: [*(values * c if len(values) == 1 else values), *[rest] * CHANNELS][:CHANNELS]
    labels, index, counter, word = source or (x, x, x, 0)
    with torch.cuda.device_of(x):
        _kernel[(triton.cdiv(out.numel(), BLOCK),)](
            x, out, key, labels, y if source else out, index, counter, out.numel(), b, c, h, w, index.shape[1] if source else 0,
            *four(what.mean, 0.0), *four(what.std, 1.0), what.flip or 0.0, word, int(what.pad > 0), what.pad, what.reflect,
            what.flip is not None, bool(what.mean), x.dtype == torch.uint8, what.draws, source is not None, last and c > 1, BLOCK,
            *HASH_CONSTANTS)
    return out, y
