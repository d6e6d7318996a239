"""Noise that nobody else can compute.

Keyed draws (`consilience.rng`) are right for simulations: whoever knows the seed can repeat them, and so could take the noise off
again. In a federation noise comes from a secret of the site's own. It is also tied to what it hides: the same upload, sent again
because a reply was lost, carries the same noise and tells nothing new; another upload carries fresh noise, so that the difference of
two uploads never shows the difference of what they hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import rng, tree


def secret_normal(secret: bytes, label: str, hidden: Sequence[Tensor], count: int) -> Tensor:
    """`count` standard normal numbers from a secret, a label and the tensors that they are to hide."""
    seed = hashlib.blake2b(label.encode(), key=secret, digest_size=64)
    for tensor in hidden:
        seed.update(f"/{tuple(tensor.shape)}{tensor.dtype}/".encode())
        seed.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    pairs = (count + 1) // 2
    words = np.frombuffer(hashlib.shake_256(seed.digest()).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
    u, v = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    radius = np.sqrt(-2 * np.log(u))
    both = np.concatenate([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)])
    return torch.from_numpy(both[:count].astype(np.float32))


def add_noise(vector: list[Tensor], deviation: float, key: Tensor, secret: bytes, label: str) -> list[Tensor]:
    """The vector with noise of that deviation on every coordinate: from the secret where there is one, else keyed.

    Secret noise depends on the deviation too: a site may have approved apps with different ones, and a server may ask both for the same
    upload. The same numbers a and b times as long on it would cancel, and leave what they hide.
    """
    if not deviation:
        return vector
    sizes = [t.numel() for t in vector]
    flat = secret_normal(secret, f"{label} {int(key)} {deviation!r}", vector, sum(sizes)) if secret else rng.normal(key, (sum(sizes),))
    return [t + deviation * tree.to(n.reshape(t.shape), t.device) for t, n in zip(vector, flat.split(sizes))]
