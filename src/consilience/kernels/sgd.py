"""A step of SGD for all tensors of a model as one CUDA kernel, from gradients in bfloat16 or float32 as they come.

To a gradient it adds what parts declare, a tree and a pull to another (`correction`), and leaves the squared distances from the latter
for the loss: sums of each program, which a third kernel adds up in their order, so that two runs give the same bits.

It reads parameter, momentum and gradient and writes the first two, and the parameter once more in bfloat16 where the next pass is to
have it so: no gradient is cast back, no weight cast again. Of weights that are out of reach of their maps (`reach`) only decay and momentum
move; a second kernel makes many such steps at once, with the numbers in registers, each rounded as a step by itself would be.

A launch finds its tensors by a table of addresses. While a CUDA graph is recorded nothing can be copied from the host, so tables are
filled when the recording is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..channels_last import fills_memory, is_turned
from .reach import Reach

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 1 << 9              # numbers of one program: small ones leave room for other clients' kernels
MOST_NUMBERS = (1 << 31) - BLOCK
SUMS = 1 << 12              # sums that are added at a time
WIDTH = 14                  # numbers of one tensor's row in a table
ROW = 1 << 32               # a program's entry: its tensor's row times this, and its place among that tensor's programs

Place = Callable[[Tensor], Tensor]           # brings a table to the device, now or later


class Move(NamedTuple):
    """One tensor of a step."""

    param: Tensor
    momentum: Tensor | None
    grad: Tensor                  # float32 or bfloat16; of what is in reach
    narrow: Tensor | None         # gets the parameter in bfloat16, as far as it is in reach
    reach: Reach | None
    add: Tensor | None = None     # to the gradient
    target: Tensor | None = None  # what the parameter is pulled to


if triton is not None:
    @triton.jit
    def _row_of(table, programs, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """The row of this program's tensor, and the first of its numbers."""
        entry = tl.load(programs + tl.program_id(0))
        return table + (entry >> 32) * WIDTH, (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK

    @triton.jit
    def _short(row, at: tl.constexpr):
        """A number of a row that is no address: divisions of 64 bits are slow."""
        return tl.load(row + at).to(tl.int32)

    @triton.jit
    def _floats(row, at: tl.constexpr):
        return tl.multiple_of(tl.load(row + at).to(tl.pointer_type(tl.float32)), 16)

    @triton.jit
    def _halves(row, at: tl.constexpr):
        return tl.multiple_of(tl.load(row + at).to(tl.pointer_type(tl.bfloat16)), 16)

    @triton.jit
    def _own_place(row, j, inner):
        """Of number j among those in reach: its place in the tensor."""
        high, wide = _short(row, 9), _short(row, 10)
        rest = j // inner
        line = rest // wide
        place = (line % high) * _short(row, 8) + rest % wide + _short(row, 11)
        return ((line // high) * _short(row, 7) + place) * inner + j % inner

    @triton.jit
    def _optional(row, place: tl.constexpr, at, here):
        """Numbers `at` of a tensor that not every row has; else 0."""
        return tl.load(_floats(row, place) + at, mask=tl.where(tl.load(row + place) != 0, here, False), other=0.0)

    @triton.jit
    def _away(row, p, target):
        """How far parameters are from what they are pulled to, where they are."""
        return tl.where(tl.load(row + 13) != 0, p - target, 0.0)

    @triton.jit
    def _step(row, j, at, here, lr, decay, momentum, strength, away, MOMENTUM: tl.constexpr, ADD: tl.constexpr, PULL: tl.constexpr):
        """Numbers j of the gradient move numbers `at` of the parameter. All is asked for before anything is waited for: the gradient last,
        which a program looks at as soon as it has it, to widen it.
        """
        where, pace = _floats(row, 0) + at, -tl.load(lr)
        p = tl.load(where, mask=here, other=0.0)
        if MOMENTUM:
            moving = _floats(row, 1) + at
            m = tl.load(moving, mask=here, other=0.0)
        if ADD:
            more = _optional(row, 12, at, here)
        if PULL:
            target = _optional(row, 13, at, here)
        if tl.load(row + 5) > 0:
            g = tl.load(_halves(row, 2) + j, mask=here, other=0.0).to(tl.float32)
        else:
            g = tl.load(_floats(row, 2) + j, mask=here, other=0.0)
        if ADD:
            g += more
        if PULL:
            d = _away(row, p, target)
            g = tl.fma(d, strength, g)
            tl.store(away + tl.program_id(0), tl.sum(d * d))
        g = tl.fma(p, decay, g)
        if MOMENTUM:
            g = tl.fma(m, momentum, g)
            tl.store(moving, g, mask=here)
        p = tl.fma(g, pace, p)
        tl.store(where, p, mask=here)
        if tl.load(row + 3) != 0:
            tl.store(_halves(row, 3) + j, p.to(tl.bfloat16), mask=here)

    @triton.jit
    def _descend(table, programs, lr, decay, momentum, strength, away, MOMENTUM: tl.constexpr, ADD: tl.constexpr, PULL: tl.constexpr,
                 WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        row, start = _row_of(table, programs, WIDTH, BLOCK)
        count, inner = _short(row, 4), _short(row, 6)
        j = start + tl.arange(0, BLOCK)
        if inner > 0:                           # not all of the tensor is in reach
            if inner % BLOCK == 0:              # one place for the whole program
                at = _own_place(row, start, inner) + tl.arange(0, BLOCK)
                _step(row, j, at, tl.full((BLOCK,), 1, tl.int1), lr, decay, momentum, strength, away, MOMENTUM, ADD, PULL)
            else:
                _step(row, j, _own_place(row, j, inner), j < count, lr, decay, momentum, strength, away, MOMENTUM, ADD, PULL)
        elif start + BLOCK <= count:            # apart from the others, so that the compiler sees numbers side by side, all of them there
            _step(row, j, j, tl.full((BLOCK,), 1, tl.int1), lr, decay, momentum, strength, away, MOMENTUM, ADD, PULL)
        else:
            _step(row, j, j, j < count, lr, decay, momentum, strength, away, MOMENTUM, ADD, PULL)

    @triton.jit
    def _rest(table, programs, lr, decay, momentum, strength, away, steps, MOMENTUM: tl.constexpr, ADD: tl.constexpr, PULL: tl.constexpr,
              WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """What is out of reach, `steps` steps with a gradient of 0 and what is added to it."""
        row, start = _row_of(table, programs, WIDTH, BLOCK)
        j = start + tl.arange(0, BLOCK)
        side, corner = _short(row, 8), _short(row, 11)
        place = (j // _short(row, 6)) % _short(row, 7)
        high, wide = place // side - corner // side, place % side - corner % side
        met = (high >= 0) & (high < _short(row, 9)) & (wide >= 0) & (wide < _short(row, 10))
        here = (j < _short(row, 4)) & (met == 0)
        where, pace = _floats(row, 0) + j, -tl.load(lr)
        p = tl.load(where, mask=here, other=0.0)
        if MOMENTUM:
            moving = _floats(row, 1) + j
            m = tl.load(moving, mask=here, other=0.0)
        else:
            m = tl.zeros_like(p)
        if ADD:
            more = _optional(row, 12, j, here)
        else:
            more = tl.zeros_like(p)
        if PULL:
            target = _optional(row, 13, j, here)
        for step in range(steps):
            g = more
            if PULL:
                d = _away(row, p, target)
                g = tl.fma(d, strength, g)
                tl.store(away + step * tl.num_programs(0) + tl.program_id(0), tl.sum(d * d))
            g = tl.fma(p, decay, g)
            if MOMENTUM:
                g = tl.fma(m, momentum, g)
                m = g
            p = tl.fma(g, pace, p)
        if MOMENTUM:
            tl.store(moving, m, mask=here)
        tl.store(where, p, mask=here)

    @triton.jit
    def _note(away, count, scale, losses, counter, SUMS: tl.constexpr):
        """One program for every step: it adds the sums of that step to the step's loss."""
        step = tl.program_id(0)
        total = tl.zeros((SUMS,), tl.float32)
        for start in range(0, count, SUMS):
            place = start + tl.arange(0, SUMS)
            total += tl.load(away + step * count + place, mask=place < count, other=0.0)
        loss = losses + tl.load(counter) - tl.num_programs(0) + step
        tl.store(loss, tl.fma(tl.sum(total), scale, tl.load(loss)))


def usable(params: Sequence[Tensor]) -> bool:
    """Whether the kernels take these parameters: dense ones in float32 on a GPU."""
    return triton is not None and all(p.is_cuda and p.dtype == torch.float32 and dense(p) for p in params)


def dense(t: Tensor) -> bool:
    """Whether a tensor fills a piece of memory that begins where loads of several numbers may; places in it are int32."""
    return fills_memory(t) and t.data_ptr() % 16 == 0 and t.numel() < MOST_NUMBERS


def descend(moves: Sequence[Move], lr: Tensor, decay: float, momentum: float, strength: float, place: Place) -> Tensor | None:
    """param −= lr·m with m = momentum·m + grad + add + strength·(param − target) + decay·param, in place, for what is in reach.

    Gives sums of (param − target)² as it was before, for `note`, where something is pulled.
    """
    moves = [_alike(move)._replace(grad=_laid(move.grad, _reached(move), move.grad.dtype)) for move in moves if move.grad.numel()]
    return _launch(_descend, [(move, move.grad.numel()) for move in moves], lr, decay, momentum, strength, place)


def rest(moves: Sequence[Move], lr: Tensor, decay: float, momentum: float, strength: float, place: Place, steps: int) -> Tensor | None:
    """The same for what is out of reach of `moves`, as many steps at once; sums of each."""
    cut = [(_alike(move), move.param.numel()) for move in moves if move.reach is not None]
    moving = decay or momentum or any(move.add is not None or move.target is not None for move, _ in cut)
    return _launch(_rest, cut, lr, decay, momentum, strength, place, steps) if moving and steps else None


def _launch(kernel: Any, moves: Sequence[tuple[Move, int]], lr: Tensor, decay: float, momentum: float, strength: float, place: Place,
            *steps: int) -> Tensor | None:
    if not moves:
        return None
    adds, pulls = (any(getattr(move, what) is not None for move, _ in moves) for what in ("add", "target"))
    with torch.cuda.device_of(lr):
        rows, programs = _table(moves, place)
        away = lr.new_empty((*(steps or (1,)), len(programs))) if pulls else None
        kernel[(len(programs),)](rows, programs, lr, decay, momentum, strength, away, *steps, momentum != 0, adds, pulls, WIDTH, BLOCK,
                                 num_warps=4)
    return away


def note(away: Tensor | None, scale: float, losses: Tensor, counter: Tensor) -> None:
    """The last losses before place `counter`, one for every row of sums, have their sum added, times `scale`."""
    if away is not None:
        with torch.cuda.device_of(losses):
            _note[(len(away),)](away, away.shape[1], scale, losses, counter, SUMS, num_warps=8)


def _alike(move: Move) -> Move:
    """What parts declare lies in memory as the parameter does."""
    add, target = (None if t is None else _laid(t, move.param, torch.float32) for t in (move.add, move.target))
    return move._replace(add=add, target=target)


def _reached(move: Move) -> Tensor:
    return move.param if move.reach is None else move.reach.of(move.param)


def _laid(t: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as `like` is: autograd returns gradients transposed, or amid other numbers."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: (-strides[d], d))
    fits = t.shape == like.shape and t.dtype == dtype and t.permute(order).is_contiguous() and t.data_ptr() % 16 == 0
    return t if fits else torch.empty_like(like, dtype=dtype).copy_(t)


def _table(moves: Sequence[tuple[Move, int]], place: Place) -> tuple[Tensor, Tensor]:
    """A row for every tensor of which so many numbers move, and an entry for every program."""
    rows = torch.tensor([number for move, count in moves for number in _row(move, count)])
    table = place(torch.cat([rows, *(torch.arange(-(-count // BLOCK)) + row * ROW for row, (_, count) in enumerate(moves))]))
    return table[: len(rows)], table[len(rows):]


def _row(move: Move, count: int) -> list[int]:
    """Addresses of parameter, momentum, gradient and copy; how many numbers; whether the gradient is bfloat16; what is in reach:
    numbers side by side at one place of a kernel, places of a kernel and of its row, rows and columns in reach, and the first of them;
    and addresses of what is added and of what the parameter is pulled to.
    """
    param, momentum, grad, narrow, part, add, target = move
    first = [*map(_address, (param, momentum, grad, narrow)), count, int(grad.dtype == torch.bfloat16)]
    last = [*map(_address, (add, target))]
    if part is None:
        return first + [0] * (WIDTH - len(first) - len(last)) + last
    (top, bottom, _), (left, right, _) = part
    high, wide = param.shape[2:]
    return [*first, param.shape[1] if is_turned(param) else 1, high * wide, wide, bottom - top, right - left, top * wide + left, *last]


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()

