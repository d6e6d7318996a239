"""SGD's kernels: all tensors in one launch, and what is out of reach of its maps moved many steps at once.

They need a CUDA device, or Triton's interpreter: `make test-kernels`. Whole runs by them are in `core/test_descent.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from consilience import rng
from consilience.kernels import sgd
from consilience.kernels.reach import Reach, Span
from consilience.kernels.sgd import Move, descend, note, rest
from kernel_device import COMPILED, DEVICE, INTERPRETED, needs_kernels

MIDDLE, CORNER = Reach(Span(1, 2, 0), Span(1, 2, 0)), Reach(Span(1, 3, 0), Span(0, 2, 0))
ROUNDING = 2.0**-7 if INTERPRETED else 2.0**-8          # to bfloat16; the interpreter cuts off
STRENGTH = 0.3                                         # of pulls
FORMS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def here(numbers: Tensor) -> Tensor:
    return numbers.to(DEVICE)


def normal(name: str, shape: tuple[int, ...]) -> Tensor:
    return rng.normal(rng.key(0, name), shape).to(DEVICE)


@pytest.mark.gpu
def test_two_steps_by_hand() -> None:
    """p = 2, g = 1, η = 0.5, decay 0.5, momentum 0.5. First m = 1 + 0.5·2 = 2 and p = 2 − 1 = 1;
    then m = 0.5·2 + 1 + 0.5·1 = 2.5 and p = 1 − 1.25 = −0.25. All of it exact in bfloat16."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    p, m, copy = torch.tensor([2.0], device=DEVICE), torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE, dtype=torch.bfloat16)
    move = Move(p, m, torch.ones(1, device=DEVICE, dtype=torch.bfloat16), copy, None)
    lr = torch.tensor(0.5, device=DEVICE)
    seen = []
    for _ in range(2):
        descend([move], lr, 0.5, 0.5, 0.0, here)
        seen.append((p.item(), m.item(), copy.item()))
    assert seen == [(1.0, 2.0, 1.0), (-0.25, 2.5, -0.25)]


@pytest.mark.gpu
def test_two_steps_with_what_parts_declare_by_hand() -> None:
    """As before, with 0.5 added and a pull of 0.5 to 1. First m = 1 + 0.5 + 0.5·(2 − 1) + 0.5·2 = 3 and p = 2 − 1.5 = 0.5; then
    m = 0.5·3 + 1 + 0.5 + 0.5·(0.5 − 1) + 0.5·0.5 = 3 and p = 0.5 − 1.5 = −1. The squared distances are 1 and 0.25, and the losses of
    places 0 and 1 get a quarter of them."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    p, m, more, target = (torch.tensor([x], device=DEVICE) for x in (2.0, 0.0, 0.5, 1.0))
    copy = torch.zeros(1, device=DEVICE, dtype=torch.bfloat16)
    move = Move(p, m, torch.ones(1, device=DEVICE, dtype=torch.bfloat16), copy, None, more, target)
    lr, losses, counter = (torch.tensor(x, device=DEVICE) for x in (0.5, [10.0, 20.0, 30.0], [0]))
    seen = []
    for _ in range(2):
        away = descend([move], lr, 0.5, 0.5, 0.5, here)
        counter += 1
        note(away, 0.25, losses, counter)
        seen.append((p.item(), m.item(), copy.item()))
    assert seen == [(0.5, 3.0, 0.5), (-1.0, 3.0, -1.0)]
    assert losses.tolist() == [10.25, 20.0625, 30.0]


@pytest.mark.gpu
def test_three_steps_out_of_reach_by_hand() -> None:
    """Of a 3×3 kernel at p = 4 the middle alone is in reach; η = 0.5, no decay, no momentum. With 1 added and a pull of 0.5 to 2:
    4 − 0.5·(1 + 0.5·2) = 3, 3 − 0.5·(1 + 0.5·1) = 2.25, 2.25 − 0.5·(1 + 0.5·0.25) = 1.6875. Eight numbers are 2, 1 and 0.25 away from
    their target before each step: sums of squares of 32, 8 and 0.5, for the last three of four losses."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    p, more, target = (torch.full((1, 1, 3, 3), x, device=DEVICE) for x in (4.0, 1.0, 2.0))
    lr, losses, counter = torch.tensor(0.5, device=DEVICE), torch.zeros(4, device=DEVICE), torch.tensor([4], device=DEVICE)
    away = rest([Move(p, None, p, None, MIDDLE, more, target)], lr, 0.0, 0.0, 0.5, here, 3)
    note(away, 0.25, losses, counter)
    assert p.flatten().tolist() == [1.6875] * 4 + [4.0] + [1.6875] * 4
    assert losses.tolist() == [0.0, 8.0, 2.0, 0.125]


def tensors() -> dict[str, tuple[tuple[int, ...], Reach | None, torch.dtype]]:
    """Of sizes for every branch: whole and cut, more and fewer numbers than a program has, side by side as many as it has."""
    return {"conv": ((5, 7, 3, 3), None, torch.bfloat16), "middle": ((70, 33, 3, 3), MIDDLE, torch.bfloat16),
            "corner": ((6, 5, 3, 4), CORNER, torch.bfloat16),
            "even": ((3, 2 * sgd.BLOCK, 3, 3), CORNER, torch.bfloat16), "linear": ((10, 600), None, torch.bfloat16),
            "scale": ((64,), None, torch.float32), "wide": ((4, 3, 2, 2), None, torch.float32)}


def declared_for(name: str, declares: str, p: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to a tensor and what it is pulled to: not all have either, and some lie otherwise than their parameter."""
    add = normal("a" + name, tuple(p.shape)) if "add" in declares and name != "linear" else None
    target = normal("t" + name, tuple(p.shape)) if "pull" in declares and name not in ("scale", "corner") else None
    return add, target if target is None or name == "wide" else torch.empty_like(p).copy_(target)


def moves_and_wanted(form: str, momentum: float, decay: float, lr: float,
                     declares: str = "") -> tuple[list[Move], list[Tensor], list[Tensor]]:
    """Moves, and what parameters and momenta should be after a step that reaches all of them."""
    moves, params, momenta = [], [], []
    for name, (shape, part, dtype) in tensors().items():
        p, m, g = normal(name, shape), normal("m" + name, shape), normal("g" + name, shape)
        if p.dim() == 4:
            p, m, g = (t.contiguous(memory_format=FORMS[form]) for t in (p, m, g))
        g = g.to(dtype)
        if part is not None:
            only = torch.zeros_like(g)
            part.of(only).copy_(part.of(g))
            g = only
        arrived = g if part is None else part.of(g).clone()
        add, target = declared_for(name, declares, p)
        moves.append(Move(p.clone(), m.clone() if momentum else None, arrived, torch.zeros_like(arrived, dtype=torch.bfloat16), part,
                          add, target))
        slope = g.float() + decay * p + (0 if add is None else add) + (0 if target is None else STRENGTH * (p - target))
        m = momentum * m + slope if momentum else slope
        params.append(p - lr * m)
        momenta.append(m)
    return moves, params, momenta


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.1), (0.0, 0.1), (0.9, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("declares", ["", "add", "pull", "add and pull"])
def test_every_number_makes_its_step(form: str, momentum: float, decay: float, declares: str) -> None:
    """And the distances from what is pulled to, of all numbers as they were before, are in the loss."""
    needs_kernels()
    moves, params, momenta = moves_and_wanted(form, momentum, decay, 0.1, declares)
    before = [move.grad.clone() for move in moves]
    apart = sum((move.param - move.target).square().sum() for move in moves if move.target is not None)
    lr, losses, counter = torch.tensor(0.1, device=DEVICE), torch.ones(3, device=DEVICE), torch.tensor([2], device=DEVICE)
    note(descend(moves, lr, decay, momentum, STRENGTH, here), 0.5, losses, counter)
    note(rest(moves, lr, decay, momentum, STRENGTH, here, 1), 0.5, losses, counter)
    torch.testing.assert_close(losses, torch.tensor([1.0, 1.0 + 0.5 * apart, 1.0], device=DEVICE), rtol=1e-5, atol=0.0)
    for move, p, m, g in zip(moves, params, momenta, before):
        torch.testing.assert_close(move.param, p, rtol=1e-5, atol=1e-6)
        if momentum:
            torch.testing.assert_close(move.momentum, m, rtol=1e-5, atol=1e-6)
        reached = p if move.reach is None else move.reach.of(p)
        torch.testing.assert_close(move.narrow.float(), reached, rtol=ROUNDING, atol=1e-6)      # type: ignore[union-attr]
        assert torch.equal(move.grad, g)


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("declares", ["", "add", "pull", "add and pull"])
def test_steps_out_of_reach_are_made_at_once(momentum: float, declares: str) -> None:
    """Bit for bit what one after another gives; what is in reach stays."""
    needs_kernels()
    lr = torch.tensor(0.1, device=DEVICE)
    once, _, _ = moves_and_wanted("channels_last", momentum, 0.1, 0.1, declares)
    singly, _, _ = moves_and_wanted("channels_last", momentum, 0.1, 0.1, declares)
    start = [move.param.clone() for move in once]
    losses = torch.zeros(2, 5, device=DEVICE)
    note(rest(once, lr, 0.1, momentum, STRENGTH, here, 5), 0.5, losses[0], torch.tensor([5], device=DEVICE))
    for step in range(5):
        note(rest(singly, lr, 0.1, momentum, STRENGTH, here, 1), 0.5, losses[1], torch.tensor([step + 1], device=DEVICE))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0.0)
    assert (losses > 0).all() if "pull" in declares else not losses.any()
    for a, b, p in zip(once, singly, start):
        assert torch.equal(a.param, b.param)
        assert a.momentum is None or torch.equal(a.momentum, b.momentum)
        if a.reach is None:
            assert torch.equal(a.param, p)
        else:
            assert torch.equal(a.reach.of(a.param), a.reach.of(p))
            assert not torch.equal(a.param, p)


@pytest.mark.gpu
@pytest.mark.parametrize("turn", [lambda g: g.t().contiguous().t(), lambda g: torch.cat([g, g])[1:11]], ids=["transposed", "begins amid"])
def test_gradients_that_lie_otherwise(turn: Callable[[Tensor], Tensor]) -> None:
    needs_kernels()
    g = normal("g", (10, 7)).bfloat16()
    wanted = turn(g)
    p = normal("p", (10, 7))
    moved = p.clone()
    descend([Move(moved, None, wanted, None, None)], torch.tensor(0.5, device=DEVICE), 0.0, 0.0, 0.0, here)
    torch.testing.assert_close(moved, p - 0.5 * wanted.float(), rtol=1e-6, atol=1e-6)


def test_what_does_not_fill_its_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sgd.dense(torch.zeros(4, 4))
    assert sgd.dense(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    assert not sgd.dense(torch.zeros(4, 8)[:, ::2])
    assert not sgd.dense(torch.zeros(9)[1:])
    assert not sgd.usable([torch.zeros(4)])                  # not on a GPU
