"""Forward passes, points and keyed dropout."""

from __future__ import annotations

import pytest
import torch
from core_parts import Plain, Remember, federation, seeded
from torch import nn

from consilience import rng, tree
from consilience.core.network import KeyedDropout, Network
from consilience.errors import ConfigError
from consilience.parts.moon import Moon
from consilience.parts.sam import Sam
from consilience.testing import TinyNet, differences, in_model, tiny_net


def model_of(module):
    return tree.clone({"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())})


def dropping(p=0.5, layer=nn.Dropout):
    return seeded(lambda: Plain(nn.Sequential(nn.Flatten(), layer(p))))


# ---- passes ----------------------------------------------------------------------------------------------------------

def test_a_pass_is_the_modules_own():
    module = tiny_net()
    x = rng.normal(rng.key(1), (6, 1, 8, 8))
    expected = {train: module.train(train)(x).detach() for train in (False, True)}
    fresh = tiny_net()
    network, model = Network(tiny_net()), model_of(fresh)
    for train in (False, True):
        assert torch.equal(network.forward(model, x, train).logits, expected[train])


def test_only_a_pass_with_leave_writes_buffers():
    network, model = Network(tiny_net()), model_of(tiny_net())
    before = tree.clone(model)
    x = rng.normal(rng.key(1), (6, 1, 8, 8))
    network.forward(model, x, train=True)
    assert all(torch.equal(model["buffers"][k], b) for k, b in before["buffers"].items())
    network.forward(model, x, train=True, update_buffers=True)
    assert model["buffers"]["stage1.1.num_batches_tracked"].item() == 1
    network.forward(model, x, train=False, update_buffers=True)
    assert model["buffers"]["stage1.1.num_batches_tracked"].item() == 1


def test_models_do_not_mix():
    network = Network(tiny_net())
    a, b = model_of(TinyNet()), model_of(TinyNet())
    x = rng.normal(rng.key(1), (6, 1, 8, 8))
    first = network.forward(a, x).logits
    network.forward(b, x, train=True, update_buffers=True)
    assert torch.equal(network.forward(a, x).logits, first)


def test_points_show_what_enters_and_what_leaves():
    network = Network(tiny_net(), ["head:input", "neck", "stage1"])
    model, x = model_of(tiny_net()), rng.normal(rng.key(1), (6, 1, 8, 8))
    trace = network.forward(model, x)
    net = tiny_net().eval()
    torch.testing.assert_close(trace.before["stage1"], net.stage1(x))
    torch.testing.assert_close(trace.before["head:input"], net.header(net.neck(net.stage1(x))))

    def double(trace, point, h):
        return 2 * h if point == "head:input" else h
    tapped = network.forward(model, x, tap=double)
    torch.testing.assert_close(tapped.before["head:input"], trace.before["head:input"])
    torch.testing.assert_close(tapped.after["head:input"], 2 * trace.before["head:input"])
    torch.testing.assert_close(tapped.logits, net.head(2 * trace.before["head:input"]))


class After(TinyNet):
    """Something comes after the head, with a mode and with weights."""

    def __init__(self):
        super().__init__()
        self.last = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        return self.last(super().forward(x))


@pytest.mark.parametrize("train", [False, True])
def test_a_tap_may_run_a_module_of_another_model_in_the_midst_of_a_pass(train):
    """The pass goes on with its own weights and in its own mode, and the module's points do not fire again."""
    network = Network(After(), ["head:input", "head"])
    mine, other = model_of(seeded(After)), model_of(After())
    x = rng.normal(rng.key(1), (6, 1, 8, 8))

    def tap(trace, point, value):
        return value + network.apply(other, "head", trace.after["head:input"], not train) if point == "head" else value
    seen = network.forward(mine, x, train, tap)
    z = seen.before["head:input"]
    heads = [nn.functional.linear(z, m["params"]["head.weight"], m["params"]["head.bias"]) for m in (mine, other)]
    torch.testing.assert_close(seen.after["head"], heads[0] + heads[1])
    last = seeded(After).last.train(train)
    torch.testing.assert_close(seen.logits, last(heads[0] + heads[1]))
    assert torch.equal(network.forward(mine, x, train, tap).logits, seen.logits)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_a_tap_may_run_another_model_in_the_midst_of_a_pass(train, half):
    """The pass goes on with its own weights, mode, statistics and coins, and its later points still fire."""
    def making():
        return Plain(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64)))
    network = Network(making(), ["body.1", "head:input"], half=half)
    mine, other = model_of(seeded(making)), model_of(making())
    x, key = rng.normal(rng.key(1), (6, 1, 8, 8)), lambda: rng.key(2)
    alone, theirs = network.forward(mine, x, train, key=key), network.forward(other, x, not train, key=key)
    inner = []

    def tap(trace, point, value):
        if point == "body.1":
            inner.append(network.forward(other, x, not train, key=key))
        return value
    seen = network.forward(mine, x, train, tap, key=key)
    assert torch.equal(seen.logits, alone.logits)
    assert torch.equal(inner[0].logits, theirs.logits)
    assert torch.equal(seen.before["head:input"], alone.before["head:input"])
    for k, b in alone.buffers.items():
        assert torch.equal(seen.buffers[k], b)


def test_a_pass_holds_on_to_no_tap():
    """A tap holds on to its step, and with it to all maps of it."""
    network, model = Network(tiny_net(), ["neck"]), model_of(tiny_net())
    network.forward(model, torch.zeros(2, 1, 8, 8), tap=lambda trace, point, value: value)
    assert network._tap is None


def test_an_error_inside_the_model_leaves_the_network_usable():
    network, model = Network(tiny_net(), ["neck"]), model_of(tiny_net())
    with pytest.raises(RuntimeError):
        network.forward(model, torch.zeros(2, 1, 5, 5))
    assert network.forward(model, torch.zeros(2, 1, 8, 8)).logits.shape == (2, 3)


def test_the_module_given_is_never_the_state():
    module = tiny_net()
    before = model_of(module)
    fed = federation(module, momentum=0.9)
    fed.round()
    now = model_of(module)
    assert all(torch.equal(now["params"][k], p) for k, p in before["params"].items())
    assert all(torch.equal(now["buffers"][k], p) for k, p in before["buffers"].items())
    assert module.training


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x.flatten(1))))


def test_tied_weights_stay_tied_or_are_refused():
    try:
        fed = federation(seeded(Tied))
    except ConfigError:
        return
    fed.round()
    x, p = fed.samples.x[:4], fed.model["params"]
    h = x.flatten(1) @ p["a.weight"].T @ p["a.weight"].T
    torch.testing.assert_close(fed.look(0, fed.client(0), fed.model, x, False, True).logits, h @ p["head.weight"].T + p["head.bias"])


# ---- dropout ---------------------------------------------------------------------------------------------------------

def test_dropout_acts_in_training():
    with_it, without = federation(dropping(0.5)), federation(dropping(0.0))
    with_it.round()
    without.round()
    assert differences(with_it, without, only=in_model)


def test_dropout_is_keyed_not_drawn_from_the_global_generator():
    ends = []
    for seed, order in ((1, [0, 1, 3]), (2, [3, 0, 1])):
        torch.manual_seed(seed)
        fed = federation(dropping(), Remember())
        state = torch.get_rng_state()
        fed.round(order)
        fed.round(order)
        assert torch.equal(torch.get_rng_state(), state)
        ends.append(fed)
    assert not differences(*ends)
    other = federation(dropping(), Remember(), seed=5)
    other.round([0, 1, 3])
    assert differences(ends[0], other, only=in_model)


def test_evaluation_has_no_dropout():
    fed = federation(dropping(0.9))
    x = fed.samples.x[:4]
    p = fed.model["params"]
    assert torch.equal(fed.look(0, fed.client(0), fed.model, x, False, True).logits,
                       torch.nn.functional.linear(x.flatten(1), p["head.weight"], p["head.bias"]))


@pytest.mark.parametrize(("layer", "shape", "whole"), [(nn.Dropout, (4, 6, 5, 5), False), (nn.Dropout2d, (4, 6, 5, 5), True)])
def test_coins(layer, shape, whole):
    network = Network(nn.Sequential(layer(0.3)))
    x = torch.ones(shape)
    draws = [network.forward({"params": {}, "buffers": {}}, x, train=True, key=lambda w=w: rng.key(1, w)).logits for w in ("a", "a", "b")]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    values = draws[0].unique().tolist()
    assert values == pytest.approx([0.0, 1 / 0.7])                # what is kept is scaled, so that the mean stays
    zeros_per_map = (draws[0] == 0).sum((2, 3))
    assert whole == set(zeros_per_map.flatten().tolist()).issubset({0, 25})


def test_rate_of_dropout():
    # 100,000 coins at 0.3: standard error 0.00145
    network = Network(nn.Sequential(nn.Dropout(0.3)))
    out = network.forward({"params": {}, "buffers": {}}, torch.ones(100, 1000), train=True, key=lambda: rng.key(3)).logits
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.0075)


def test_dropping_everything_gives_zeros_and_no_gradient():
    """As nn.Dropout(1) does. 1 / (1 − p) is infinite, and a gradient of 0 · ∞ would not be a number."""
    network, x = Network(nn.Sequential(nn.Dropout(1.0))), torch.ones(4, 5, requires_grad=True)
    out = network.forward({"params": {}, "buffers": {}}, x, train=True, key=lambda: rng.key(3)).logits
    assert torch.equal(out, torch.zeros(4, 5))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.zeros(4, 5))


def test_two_layers_have_coins_of_their_own():
    network = Network(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    assert [type(m) for m in network.module] == [KeyedDropout, KeyedDropout]
    out = network.forward({"params": {}, "buffers": {}}, torch.ones(50, 100), train=True, key=lambda: rng.key(3)).logits
    assert (out == 0).float().mean().item() == pytest.approx(0.75, abs=0.04)       # equal coins would drop half


def test_both_passes_of_sam_see_the_same_coins():
    # at radius zero the second pass must give the first one's gradient bit for bit
    a, b = federation(dropping(), Sam(rho=0.0)), federation(dropping())
    for f in (a, b):
        f.round()
    assert not differences(a, b, only=in_model)


def test_reference_models_have_no_dropout():
    a, b = federation(dropping(), Moon(mu=0.0)), federation(dropping())
    for f in (a, b):
        f.round()
        f.round()
    assert not differences(a, b, only=in_model)
