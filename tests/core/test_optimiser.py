"""The local optimisers against torch.optim, on gradients given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience import rng, tree
from consilience.core import optimiser
from consilience.core.policy import Policy


def start():
    return {"a": rng.normal(rng.key(1, "a"), (3, 2)), "b": rng.normal(rng.key(1, "b"), (4,))}


def grads(step):
    return {"a": rng.normal(rng.key(2, "a", step), (3, 2)), "b": rng.normal(rng.key(2, "b", step), (4,))}


@pytest.mark.parametrize(("policy", "reference"), [
    ({"lr": 0.1}, lambda ps: torch.optim.SGD(ps, 0.1)),
    ({"lr": 0.1, "weight_decay": 0.2}, lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.2)),
    ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.2)),
    ({"lr": 0.01, "optimiser": "adam"}, lambda ps: torch.optim.Adam(ps, 0.01)),
    ({"lr": 0.01, "optimiser": "adam", "weight_decay": 0.2}, lambda ps: torch.optim.Adam(ps, 0.01, weight_decay=0.2)),
], ids=["sgd", "decay", "momentum", "adam", "adam-decay"])
def test_against_torch(policy, reference):
    policy = Policy(**policy)
    params, theirs = start(), {k: p.requires_grad_() for k, p in start().items()}
    state, other = optimiser.init(policy, params), reference(list(theirs.values()))
    for step in range(6):
        g = grads(step)
        optimiser.update(policy, params, g, state, torch.tensor(policy.lr))
        for k, p in theirs.items():
            p.grad = g[k].clone()
        other.step()
        for k, p in theirs.items():
            torch.testing.assert_close(params[k], p.detach(), atol=1e-6, rtol=1e-5)


def test_keys_without_a_gradient_do_not_move():
    policy = Policy(momentum=0.9, weight_decay=0.5)
    params = start()
    state = optimiser.init(policy, {"a": params["a"]})
    optimiser.update(policy, params, {"a": grads(0)["a"]}, state, torch.tensor(0.1))
    assert torch.equal(params["b"], start()["b"])
    assert not torch.equal(params["a"], start()["a"])


def test_gradients_are_not_written_to():
    policy = Policy(momentum=0.9, weight_decay=0.5)
    params, g = start(), grads(0)
    state = optimiser.init(policy, params)
    optimiser.update(policy, params, g, state, torch.tensor(0.1))
    optimiser.update(policy, params, g, state, torch.tensor(0.1))
    assert all(torch.equal(v, grads(0)[k]) for k, v in g.items())


def test_plain_sgd_has_no_state():
    assert optimiser.init(Policy(), start()) == {}
    assert tree.count_bytes(optimiser.init(Policy(momentum=0.5), start())) == 4 * 10
    assert tree.count_bytes(optimiser.init(Policy(optimiser="adam"), start())) == 4 * (2 * 10 + 1)


@given(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32), st.floats(0.0009765625, 1, width=32))
def test_descend(p, g, lr):
    params = [torch.tensor([p])]
    optimiser.descend(params, [torch.tensor([g])], torch.tensor(lr))
    assert params[0].item() == pytest.approx(p - lr * g, abs=1e-5)
    optimiser.descend([], [], torch.tensor(lr))


def test_pieces_are_the_same_memory():
    tensors = [torch.zeros(5000), torch.zeros(3, 2, 4, 4).contiguous(memory_format=torch.channels_last), torch.zeros(100_000)]
    like = [torch.ones_like(t) for t in tensors]
    pieces, others, none = optimiser.in_pieces(tensors, like, [])
    assert none == []
    assert len(pieces) <= optimiser.PIECES
    assert [p.numel() for p in pieces] == [p.numel() for p in others]
    assert len(pieces) > len(tensors)
    for number, (piece, other) in enumerate(zip(pieces, others)):
        piece.add_(other, alpha=number + 1)
    assert all(bool((t > 0).all()) for t in tensors)           # every number was reached, and through one piece
    # 105,096 numbers over 48 − 3 pieces are 2,336 each, rounded up to 4,096: 2, 1 and 25 pieces
    assert [int(t.unique().numel()) for t in tensors] == [2, 1, 25]


def test_tensors_that_do_not_fill_their_memory_stay_whole():
    apart = [torch.zeros(6, 4)[:, ::2]]
    assert optimiser.in_pieces(apart, apart)[0] is apart
    many = [torch.zeros(3)] * optimiser.PIECES
    assert optimiser.in_pieces(many, many)[0] is many


@pytest.mark.parametrize("policy", [Policy(), Policy(momentum=0.9), Policy(weight_decay=0.5), Policy(optimiser="adam")])
def test_what_is_plain_is_descent_alone(policy):
    params, lr = start(), torch.tensor(0.1)
    optimiser.update(policy, params, grads(1), optimiser.init(policy, params), lr)
    optimiser.update(policy, params, grads(0), state := optimiser.init(policy, params), lr)
    optimiser.update(policy, params, grads(1), state, lr)
    alone = start()
    for step in (1, 0, 1):
        optimiser.descend([*alone.values()], [*grads(step).values()], lr)
    assert optimiser.is_plain(policy) is all(torch.equal(params[k], alone[k]) for k in alone)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [Policy(), Policy(momentum=0.9, weight_decay=0.01)])
def test_a_gpu_descends_as_the_cpu(policy):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sizes = {"w": (300, 700), "b": (7,), "c": (8, 3, 5, 5)}
    seen = []
    for device in ("cpu", "cuda"):
        draw = lambda word, shape, d=device: rng.normal(rng.key(0, word), shape).to(d)
        params = {k: draw(k, s) for k, s in sizes.items()}
        state, lr = optimiser.init(policy, params), torch.tensor(0.1, device=device)
        for step in range(3):
            optimiser.update(policy, params, {k: draw(f"g{k}{step}", s) for k, s in sizes.items()}, state, lr)
        seen.append([t.cpu() for t in params.values()])
    for here, there in zip(*seen):
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)
