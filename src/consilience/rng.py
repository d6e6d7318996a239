"""Keyed randomness: every draw is a hash of (seed, purpose, client, round, step, pass, part).

A key is a 0-d int64 tensor, so that keys can be made and used on a device inside a captured step. There is no generator
and no hidden state: adding a draw somewhere never changes a draw elsewhere, and resuming a run needs no saved state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels import hashing
from .kernels.hashing import HASH_CONSTANTS


def _signed(x: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return x - (1 << 64) if x >= (1 << 63) else x


_GOLDEN, _MIX_1, _MIX_2 = HASH_CONSTANTS
_ALL = 1 << 64
_GOLDEN_U, _MIX_1U, _MIX_2U = (np.uint64(c % _ALL) for c in HASH_CONSTANTS)
_U30, _U27, _U31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SMALL = 1 << 15              # draws up to this size are made by NumPy, larger ones by torch and its threads


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on wrapping int64."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _number(words: Sequence[str | int]) -> int:
    """FNV-1a of words that the host knows; costs the device nothing."""
    h = 0xCBF29CE484222325
    for byte in "/".join(map(str, words)).encode():
        h = ((h ^ byte) * 0x100000001B3) % (1 << 64)
    return _signed(h)


def _mix_int(x: int) -> int:
    """`_mix` of one number that the host knows: a tenth of the time that tensors of one element take."""
    x %= _ALL
    x = (x ^ (x >> 30)) * _MIX_1 % _ALL
    x = (x ^ (x >> 27)) * _MIX_2 % _ALL
    return _signed(x ^ (x >> 31))


def _mix_array(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`_mix` in place, for numbers on the host."""
    x ^= x >> _U30
    x *= _MIX_1U
    x ^= x >> _U27
    x *= _MIX_2U
    x ^= x >> _U31
    return x.view(np.int64)


def _draw_array(keys: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """bits(keys[i], n) for every i, on the host."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN_U
    return _mix_array(keys.view(np.uint64)[..., None] + steps)


def _readable(key: Tensor) -> bool:
    """Whether the host can read a single key at once: it lies there, no vmap stands before it, and nobody records the operations, for
    a recorded step would repeat the numbers instead of drawing anew.
    """
    return (key.dim() == 0 and key.device.type == "cpu" and not torch._C._functorch.is_batchedtensor(key)
            and not torch._C._len_torch_dispatch_stack())


def number(*words: str | int) -> int:
    """What `key` folds in for these words, for kernels that make keys for themselves."""
    return _number(words)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key from a key and a number (an int, or an int64 tensor)."""
    if hashing.folds(key, number):
        return hashing.fold(key, number)
    if isinstance(number, int) and _readable(key):
        return torch.tensor(_mix_int(int(key.numpy()) * _GOLDEN + number), dtype=torch.int64)
    return _mix(key * _GOLDEN + number)


def key(base: int | Tensor, *words: str | int) -> Tensor:
    """A key from a seed or a key, and words that name the purpose."""
    start = base if isinstance(base, Tensor) else torch.tensor(base, dtype=torch.int64)
    return fold(start, _number(words))


def bits(key: Tensor, n: int) -> Tensor:
    """n int64 with all 64 bits random."""
    if key.dim() == 0 and hashing.usable(key):
        return hashing.draw(key, n, False)
    if n <= _SMALL and _readable(key):
        return torch.from_numpy(_draw_array(key.numpy(), n))
    return _mix(key + (torch.arange(n, device=key.device) + 1) * _GOLDEN)


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in (0, 1), never 0 and never 1."""
    if key.dim() == 0 and hashing.usable(key):
        return hashing.draw(key, math.prod(shape), True).reshape(tuple(shape))
    return (_shift(bits(key, math.prod(shape)), 41).float() + 0.5).div(1 << 23).reshape(tuple(shape))


def box_muller(u: Tensor, v: Tensor) -> Tensor:
    """Standard normal numbers from two tensors of uniform ones."""
    return torch.sqrt(-2 * torch.log(u)) * torch.cos(2 * torch.pi * v)


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers."""
    return box_muller(*uniform(key, (2, *shape)).unbind())


def integers(key: Tensor, below: int | Tensor, shape: Sequence[int]) -> Tensor:
    """Whole numbers 0 … below − 1. The bias of the modulus is under below / 2^62."""
    return (_shift(bits(key, math.prod(shape)), 1) % below).reshape(tuple(shape))


def permutation(key: Tensor, n: int) -> Tensor:
    """0 … n − 1 in random order."""
    return shuffles(key[None], n)[0] if n > 1024 and key.device.type == "cpu" else bits(key, n).argsort()


def keys(base: int | Tensor, *words: str | int, each: Iterable[str | int]) -> Tensor:
    """key(base, *words, e) for every e, as one tensor."""
    start = base if isinstance(base, Tensor) else torch.tensor(base, dtype=torch.int64)
    return fold(start, torch.tensor([_number((*words, e)) for e in each], dtype=torch.int64, device=start.device))


def shuffles(keys: Tensor, n: int) -> Tensor:
    """permutation(keys[i], n) for every i: (keys, n). Where the keys lie, so on a GPU when they do."""
    if keys.device.type != "cpu":
        drawn = (hashing.draw(keys, n, False) if hashing.usable(keys)
                 else _mix(keys[:, None] + (torch.arange(n, device=keys.device) + 1) * _GOLDEN))
        return drawn.argsort(dim=1, stable=True)
    draws = _draw_array(keys.numpy(), n)
    # Numbers are sorted faster than their places, so the places ride along in the lowest bits. Should two draws differ in nothing but
    # those, the whole draws decide.
    low = np.int64((1 << max(n - 1, 0).bit_length()) - 1)
    packed = np.sort((draws & ~low) | np.arange(n), axis=1)
    if n > 1 and not (((packed[:, 1:] ^ packed[:, :-1]) & ~low) != 0).all():
        return torch.from_numpy(draws).argsort(dim=1, stable=True)
    return torch.from_numpy(packed & low)


def permutations(keys: Tensor, sizes: Tensor) -> Tensor:
    """permutation(keys[i], sizes[i]) for every i, one after another. Keys and sizes are on the host."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    drawn = _mix(keys[owner] + (place + 1) * _GOLDEN)
    return place[torch.from_numpy(np.lexsort((drawn.numpy(), owner.numpy())))]


def subset(key: Tensor, n: int, size: int) -> list[int]:
    """`size` different numbers of 0 … n − 1, ascending; every subset is equally likely. Work grows with `size` alone (Floyd)."""
    last = torch.arange(n - size, n)                    # the j-th draw is from 0 … last[j]
    drawn = (_shift(bits(key, size), 1) % (last + 1)).tolist()
    chosen: set[int] = set()
    for top, number in zip(last.tolist(), drawn):
        chosen.add(top if number in chosen else number)
    return sorted(chosen)


def host(key: Tensor) -> np.random.Generator:
    """A NumPy generator for what needs rejection sampling (Beta, Dirichlet); for planning only, never inside a step."""
    return np.random.Generator(np.random.Philox(key=int(key) % (1 << 64)))


def seed_torch(key: Tensor) -> int:
    """A seed for torch's own initialisers, used under `torch.random.fork_rng` when a module is made."""
    return int(key) % (1 << 63)
