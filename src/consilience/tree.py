"""Arithmetic on trees: nested dicts whose leaves are tensors. Nothing here changes its arguments, but `copy_into`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]           # nested dicts with tensors as leaves
Flat = dict[str, Tensor]        # one level: parameters, gradients
SMALL, ALIGNED = 1 << 14, 16    # numbers in a tensor that travels together with others; bytes at which each begins


def map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply f leaf by leaf; every tree has the keys of the first."""
    if isinstance(tree, dict):
        return {k: map(f, v, *(o[k] for o in others)) for k, v in tree.items()}
    return f(tree, *others)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors, in the order of the keys."""
    return [t for v in tree.values() for t in leaves(v)] if isinstance(tree, dict) else [tree]


def paths(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """('a/b', leaf) for every leaf."""
    if isinstance(tree, dict):
        for k, v in tree.items():
            yield from paths(v, f"{prefix}/{k}" if prefix else str(k))
    else:
        yield prefix, tree


def nested(flat: dict[str, Tensor]) -> Tree:
    """The inverse of `paths`."""
    out: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        at = out
        for p in parents:
            at = at.setdefault(p, {})
        at[last] = leaf
    return out


def like(template: Any, flat: dict[str, Any], prefix: str = "") -> Any:
    """The template's shape, empty branches included, with the leaves of `flat` by their paths."""
    if isinstance(template, dict):
        return {k: like(v, flat, f"{prefix}/{k}" if prefix else str(k)) for k, v in template.items()}
    return flat[prefix]


def count_bytes(tree: Any) -> int:
    """Bytes of all tensors together."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


def clone(tree: Any) -> Any:
    """A copy of every leaf, with its memory layout. On a GPU all leaves are copied in a few launches."""
    flat = leaves(tree)
    if not flat or not flat[0].is_cuda:
        return map(lambda x: x.detach().clone(), tree)
    copies = [torch.empty_like(t, requires_grad=False) for t in flat]
    _copy_all(copies, flat)
    following = iter(copies)
    return map(lambda _: next(following), tree)


@torch.no_grad()
def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """target ← source for every pair: one launch for all that lie on the GPU with the same type, the others one by one.

    Small tensors that go from the host to a GPU travel together.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    small: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):
        if not target.numel():
            continue
        alike = target.is_cuda and target.dtype == source.dtype
        if alike and source.is_cuda:
            group = groups.setdefault(target.dtype, ([], []))
        elif alike and source.numel() <= SMALL:
            group = small.setdefault(target.device, ([], []))
        else:
            target.detach().copy_(sendable(source, target.device), non_blocking=True)
            continue
        group[0].append(target.detach())
        group[1].append(source.detach())
    for device, (one, other) in small.items():
        for target, arrived in zip(one, send_together(other, device)):
            group = groups.setdefault(target.dtype, ([], []))
            group[0].append(target)
            group[1].append(arrived)
    for one, other in groups.values():
        torch._foreach_copy_(one, other)


def send_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on a GPU, in one copy: each would take as long as all of them."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
    places = [slice(end - -(-size // ALIGNED) * ALIGNED, end - -(-size // ALIGNED) * ALIGNED + size) for size, end in zip(sizes, ends)]
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, t in zip(places, tensors):
        packed[place].copy_(t.reshape(-1).view(torch.uint8))
    arrived = packed.to(device, non_blocking=True)
    return [arrived[place].view(t.dtype).view(t.shape) for place, t in zip(places, tensors)]


def zeros(tree: Any) -> Any:
    return map(torch.zeros_like, tree)


def to(tree: Any, device: Any) -> Any:
    """The same tree on another device."""
    return map(lambda x: sendable(x, torch.device(device)).to(device, non_blocking=True), tree)


def sendable(x: Tensor, device: torch.device) -> Tensor:
    """x, in page-locked memory where it goes from host to GPU: from ordinary memory the copy would wait for all work before it."""
    return x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x


def all_finite(tree: Any) -> Tensor:
    """One boolean on the device for the whole tree."""
    floats = [t for t in leaves(tree) if t.is_floating_point() and t.numel()]
    if not floats:
        return torch.tensor(True)
    if not floats[0].is_cuda:
        # A sum with a NaN or an infinity in it is never finite, and it is forty times as fast as a maximum of magnitudes; where
        # numbers near the end of the range add up beyond it, the maximum decides.
        sums = torch.stack([t.detach().sum().float() for t in floats]).isfinite().all()
        if bool(sums):
            return sums
    # the largest magnitude shows NaN and infinity alike, in one pass and without a copy
    return torch.stack(torch._foreach_norm(floats, float("inf"))).isfinite().all()


def copy_into(target: Any, source: Any) -> None:
    """Overwrite target's tensors; with `copy_pairs` the one function here that writes, for engines only."""
    copy_pairs(matched(target, source))


def copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """first ← second, for all pairs at once."""
    both = list(pairs)
    _copy_all([t for t, _ in both], [s for _, s in both])


def matched(target: Any, source: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Leaf beside leaf; both trees have the same keys."""
    if not isinstance(target, dict):
        yield target, source
        return
    if target.keys() != source.keys():
        raise KeyError(f"trees differ: {sorted(target.keys() ^ source.keys())}")
    for k in target:
        yield from matched(target[k], source[k])


# Flat dicts of tensors (parameters, gradients): one fused call for all leaves.

def pick(flat: Flat, keys: Iterable[str]) -> Flat:
    """The entries of these keys, in their order."""
    return {k: flat[k] for k in keys}


def add(a: Flat, b: Flat, alpha: float = 1.0) -> Flat:
    """a + alpha · b, over a's keys."""
    return dict(zip(a, torch._foreach_add([*a.values()], [b[k] for k in a], alpha=alpha))) if a else {}


def sub(a: Flat, b: Flat) -> Flat:
    """a − b, over a's keys."""
    return dict(zip(a, torch._foreach_sub([*a.values()], [b[k] for k in a]))) if a else {}


def scale(a: Flat, factor: float | Tensor) -> Flat:
    """factor: a number, or a 0-d tensor."""
    return dict(zip(a, torch._foreach_mul([*a.values()], factor))) if a else {}


def divide(a: Flat, by: Flat) -> Flat:
    """by: a 0-d tensor per key."""
    return {k: a[k] / by[k] for k in a}


def add_where(a: Flat, b: Flat) -> Flat:
    """a + b on the keys they share; a elsewhere."""
    common = [k for k in a if k in b]
    return {**a, **add(pick(a, common), pick(b, common))} if common else a


class _SquaredDistance(torch.autograd.Function):
    """One pass forward and one backward over the first n tensors; the naive graph takes six."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> Tensor:
        ctx.difference, ctx.first = torch._foreach_sub(tensors[:n], tensors[n:]), tensors[:n]
        if tensors[0].is_cuda:                            # a product of each with itself is two kernels a tensor
            return torch.stack(torch._foreach_norm(ctx.difference)).square().sum()
        return torch.stack([torch.dot(d.flatten(), d.flatten()) for d in ctx.difference]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():                       # create_graph=True: the differences as functions of the tensors again
            back = [2 * grads[0] * (d + (t - t.detach())) for d, t in zip(ctx.difference, ctx.first)]
        else:
            back = list(torch._foreach_mul(ctx.difference, 2 * grads[0]))
        return (None, *back, *([None] * len(back)))


def sq_dist(a: Flat, b: Flat) -> Tensor | float:
    """Squared distance over a's keys; b is constant, no gradient reaches it."""
    return _SquaredDistance.apply(len(a), *a.values(), *(b[k] for k in a)) if a else 0.0


def norm(a: Flat) -> Tensor:
    """The length of all entries as one vector."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*a.values()])))
