"""Convolution, ReLU and pooling as one on CPUs give PyTorch's numbers, gradients from the same places, and its layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consilience import rng
from consilience.core import network
from consilience.core.network import Network, staged
from consilience.layers import stage_cpu, stages
from consilience.models import make

LAST = torch.channels_last


def whole(shape: tuple[int, ...], *words: str | int) -> Tensor:
    """Numbers of −2 … 2. Their products and sums are exact in float32 in any order, and many windows have several largest elements."""
    return rng.integers(rng.key(0, *words), 5, shape).float() - 2


def stage(inputs: int, outputs: int, window: int = 2, pooling: dict[str, object] | None = None, **more: object) -> nn.Sequential:
    chain = nn.Sequential(nn.Conv2d(inputs, outputs, 3, **more), nn.ReLU(), nn.MaxPool2d(window, **(pooling or {})))
    with torch.no_grad():
        for name, p in chain.named_parameters():
            p.copy_(whole(tuple(p.shape), name))
    return chain


def one_by_one(chain: nn.Sequential, x: Tensor) -> Tensor:
    for layer in chain:
        x = type(layer).forward(layer, x)
    return x


def with_gradients(run: object, chain: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    out = run(x)
    g = whole(tuple(out.shape), "g")
    return out, *torch.autograd.grad(out, [x, *chain.parameters()], g)


@pytest.fixture
def stages_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    monkeypatch.setattr(stage_cpu, "conv_relu_pool", lambda *a, real=stage_cpu.conv_relu_pool: ran.append(1) or real(*a))
    return ran


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 4), inputs=st.integers(1, 5), outputs=st.integers(16, 20), height=st.integers(5, 13), width=st.integers(5, 13),
       padding=st.integers(0, 2), bias=st.booleans(), last=st.booleans(), data=st.integers(0, 10**6))
def test_exact_numbers_from_the_same_places(n, inputs, outputs, height, width, padding, bias, last, data):
    chain = stage(inputs, outputs, padding=padding, bias=bias)
    x = whole((n, inputs, height, width), "x", data)
    if last:
        chain, x = chain.to(memory_format=LAST), x.contiguous(memory_format=LAST)
    theirs = with_gradients(lambda t: one_by_one(chain, t), chain, x)
    stages.compute_together(chain)
    ours = with_gradients(chain, chain, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert ours[0].is_contiguous(memory_format=LAST if last and outputs > 1 else torch.contiguous_format)


@pytest.mark.parametrize(("window", "pooling", "more"), [
    (3, {"stride": 2, "padding": 1}, {}), (2, {"ceil_mode": True}, {"stride": 2}), (2, {"dilation": 2, "stride": 1}, {"dilation": 2}),
    (2, {}, {"padding": "same"}), (2, {}, {"padding": 1, "padding_mode": "reflect"}), (2, {}, {"groups": 2})], ids=str)
def test_other_convolutions_and_windows(window, pooling, more, stages_run):
    chain = stage(4, 16, window, pooling, **more)
    x = whole((3, 4, 11, 12), "x")
    theirs = with_gradients(lambda t: one_by_one(chain, t), chain, x)
    stages.compute_together(chain)
    ours = with_gradients(chain, chain, x)
    assert stages_run
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_close_numbers_at_the_size_of_use():
    """FedAvg's second stage on real numbers: 800 products in a sum, rounded in another order."""
    chain = nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2))
    with torch.no_grad():
        for name, p in chain.named_parameters():
            p.copy_(rng.normal(rng.key(0, name), tuple(p.shape)) / 28)
    x = rng.normal(rng.key(0, "x"), (10, 32, 12, 12)).relu()
    theirs = with_gradients(lambda t: one_by_one(chain, t), chain, x)
    stages.compute_together(chain)
    for a, b in zip(with_gradients(chain, chain, x), theirs):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_gradients_of_gradients():
    """d/dw of |dL/dx|² for L = Σ out²: both ways through the whole stage."""
    chain = stage(3, 16, padding=1)
    x = whole((2, 3, 8, 8), "x").requires_grad_()

    def second(run: object) -> tuple[Tensor, ...]:
        g, = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, *chain.parameters()])
    theirs = second(lambda t: one_by_one(chain, t))
    stages.compute_together(chain)
    for a, b in zip(second(chain), theirs):
        torch.testing.assert_close(a, b)


def test_not_a_number_comes_through():
    chain = stage(2, 16)
    stages.compute_together(chain)
    x = whole((1, 2, 6, 6), "x")
    x[0, 0, 0, 0] = float("nan")
    assert torch.equal(chain(x).isnan(), one_by_one(chain, x).isnan())
    assert chain(x).isnan().any()


@pytest.mark.parametrize("last", [False, True])
def test_bfloat16_is_what_autocast_gives(last, stages_run):
    """Whole numbers below 256 are exact in bfloat16: 9 products of at most 4, and a bias."""
    module = staged(nn.Sequential(stage(1, 16), nn.Flatten()))
    module = module.to(memory_format=LAST) if last else module
    chain = module.get_submodule("0")
    x = whole((4, 1, 9, 9), "x")
    model = {"params": dict(module.named_parameters()), "buffers": {}}
    with torch.autocast("cpu", torch.bfloat16):
        theirs = one_by_one(chain, x).float()
    grads = torch.autograd.grad(theirs, list(chain.parameters()), whole(tuple(theirs.shape), "g"))
    net = Network(module, half=True)
    for _ in range(2):                              # in the second pass the weights are cast beforehand
        out = net.forward(model, x, True).logits
        assert torch.equal(out, theirs.flatten(1))
        ours = torch.autograd.grad(out, list(model["params"].values()), whole(tuple(theirs.shape), "g").flatten(1))
        assert all(torch.equal(a, b) for a, b in zip(ours, grads))
    assert len(stages_run) == 2


def test_what_a_users_module_sees_is_contiguous():
    """`view` after a chain must go on working; between two chains that nobody listens to the maps stay turned."""
    built = make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model")).module
    seen: list[bool] = []
    built.get_submodule("stage2").register_forward_pre_hook(lambda m, args: seen.append(args[0].is_contiguous()))
    plain = stage(3, 16)
    stages.compute_together(plain)
    assert plain(whole((2, 3, 8, 8), "x")).view(2, -1).shape == (2, 144)
    network.compute_together(built)
    x = whole((2, 1, 28, 28), "x")
    built(x)
    assert seen == [True]
    built.get_submodule("stage2")._forward_pre_hooks.clear()
    strides: list[tuple[int, ...]] = []
    real = F.conv2d

    def look(t: Tensor, *rest: object) -> Tensor:
        strides.append(t.stride())
        return real(t, *rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "conv2d", look)
        built(x)
    assert strides == [(784, 1, 28, 1), (32 * 144, 1, 32 * 12, 32)]


BODIES = {"two stages": lambda: [*stage(3, 16), *stage(16, 16)], "a convolution after": lambda: [*stage(3, 16), nn.Conv2d(16, 4, 3)],
          "a ReLU after": lambda: [*stage(3, 16), nn.Conv2d(16, 4, 3), nn.ReLU()], "rows": lambda: [*stage(3, 16), nn.Flatten(2)],
          "stages within": lambda: [stage(3, 16), stage(16, 16)], "an average": lambda: [stage(3, 16), nn.AdaptiveAvgPool2d(2)]}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("last", [False, True])
def test_what_leaves_a_chain_lies_as_pytorch_lays_it(body, last, stages_run):
    """`features(x).view(n, -1)` is how many models go on."""
    chain, x = nn.Sequential(*BODIES[body]()), whole((2, 3, 20, 20), "x")
    x = x.contiguous(memory_format=LAST) if last else x
    theirs = chain(x)
    stages.compute_together(chain)
    ours = chain(x)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert stages_run


def test_each_stage_by_itself_gives_contiguous_maps():
    """Two stages hand turned maps to each other; who calls the first alone finds them as PyTorch lays them."""
    chain = nn.Sequential(stage(3, 16), stage(16, 16))
    stages.compute_together(chain)
    x = whole((2, 3, 20, 20), "x")
    assert chain[0](x).is_contiguous()
    assert torch.equal(chain[1](chain[0](x)), chain(x))


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_who_listens_to_the_next_layer_sees_contiguous_maps(hook, stages_run):
    chain, seen = nn.Sequential(*stage(3, 16), *stage(16, 16)), []
    stages.compute_together(chain)
    getattr(chain[3], hook)(lambda layer, args, *out: seen.append(args[0].is_contiguous()))
    chain(whole((2, 3, 20, 20), "x").requires_grad_()).sum().backward()
    assert seen == [True]
    assert len(stages_run) == 1


class Viewing(nn.Conv2d):
    """A user's own convolution, which needs its maps contiguous."""

    def forward(self, input):
        return super().forward(input) + input.view(len(input), -1).mean()


@pytest.mark.parametrize("place", [0, 3])
def test_a_users_own_convolution_sees_contiguous_maps(place):
    chain = nn.Sequential(*stage(3, 16), *stage(16, 16))
    chain[place] = Viewing(3 if place == 0 else 16, 16, 3)
    x = whole((2, 3, 20, 20), "x")
    theirs = chain(x)
    stages.compute_together(chain)
    torch.testing.assert_close(chain(x), theirs)


def test_inside_vmap_and_gradients_for_each_sample(stages_run):
    chain, x = stage(3, 16), whole((4, 2, 3, 8, 8), "x")

    def each_sample():
        loss = lambda params, one: torch.func.functional_call(chain, params, (one[None],)).square().sum()
        return torch.vmap(torch.func.grad(loss), (None, 0))(dict(chain.named_parameters()), x[:, 0])
    theirs, apart = torch.vmap(chain)(x), each_sample()
    stages.compute_together(chain)
    assert torch.equal(torch.vmap(chain)(x), theirs)
    assert all(torch.equal(g, apart[k]) for k, g in each_sample().items())
    assert not stages_run


def test_few_channels_doubles_and_kept_places_are_left_alone(stages_run):
    few, places, x = stage(2, 8), stage(2, 16, pooling={"return_indices": True}), whole((1, 2, 8, 8), "x")
    for chain, inputs in ((few, x), (places, x), (stage(2, 16).double(), x.double())):
        stages.compute_together(chain)
        chain(inputs)
    assert not stages_run
