"""The faster pooling gives PyTorch's numbers bit for bit, forward and backward, and keeps the layer what it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consilience import rng
from consilience.kernels import max_pool
from consilience.kernels.derivatives import differentiable_twice
from consilience.layers import pooling
from consilience.layers.pooling import pool_swiftly
from kernel_device import COMPILED, DEVICE, INTERPRETED, needs_cuda, needs_kernels


def maps(*shape: int) -> torch.Tensor:
    """After a ReLU half of the numbers are zero: many windows have several largest elements."""
    return rng.normal(rng.key(0, "maps"), shape).relu()


def swift(*settings, **more) -> nn.MaxPool2d:
    layer = nn.MaxPool2d(*settings, **more)
    pool_swiftly(layer)
    return layer


SETTINGS = [((2,), {}), ((3, 2, 1), {}), (((1, 2),), {"stride": 2}), ((2,), {"ceil_mode": True}), ((2, 1), {"dilation": 2})]


@pytest.mark.parametrize(("window", "more"), SETTINGS, ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_same_numbers_and_strides(window, more, form, monkeypatch):
    x = maps(4, 32, 23, 24).contiguous(memory_format=form).requires_grad_()
    used = []
    monkeypatch.setattr(pooling._Pooled, "apply", lambda *a, real=pooling._Pooled.apply: used.append(1) or real(*a))
    theirs, ours = nn.MaxPool2d(*window, **more)(x), swift(*window, **more)(x)
    assert bool(used) == (form is torch.contiguous_format)          # channels_last is fast as it is
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    g = rng.normal(rng.key(0, "g"), tuple(theirs.shape))
    a, = torch.autograd.grad(theirs, x, g)
    b, = torch.autograd.grad(ours, x, g)
    assert torch.equal(a, b)
    assert a.stride() == b.stride()


@pytest.mark.parametrize("size", [(28, 28), (23, 24), (24, 23), (32, 32)], ids=str)
@pytest.mark.parametrize("channels", [1, 6, 32])
def test_slices_give_the_same_numbers_and_strides(channels, size, monkeypatch):
    """With ties in most windows, in maps of even and odd sizes; where no gradient is asked for, no places are either."""
    x = maps(50, channels, *size)
    monkeypatch.setattr(pooling._Pooled, "apply", lambda *a: pytest.fail("places"))
    theirs = F.max_pool2d(x, 2)
    for given, grad in ((x, True), (x.clone().requires_grad_(), False)):
        with torch.set_grad_enabled(grad):
            ours = swift(2)(given)
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert torch.equal(pooling._largest(x), theirs)
    ours, places = pooling._largest_and_places(x)
    assert torch.equal(ours, theirs)
    assert torch.equal(places, F.max_pool2d(x, 2, return_indices=True)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_with_numbers_that_are_none(dtype):
    """Windows that hold one have none as their largest; all others keep their places."""
    x = maps(50, 6, 23, 24).to(dtype)
    x[0, 1, 2, 3], x[1, 2, :4, :4], x[2, 0, 5, 5] = float("nan"), float("-inf"), float("inf")
    theirs, places = F.max_pool2d(x, 2, return_indices=True)
    ours, found = pooling._largest_and_places(x)
    for given in (ours, pooling._largest(x)):
        torch.testing.assert_close(given, theirs, rtol=0, atol=0, equal_nan=True)
    assert int(theirs.isnan().sum()) == 1
    assert torch.equal(found[~theirs.isnan()], places[~theirs.isnan()])


def test_by_hand_the_first_of_equal_numbers_counts():
    """One map of 4×5, whose last column no window has. Windows: 1 7 7 0 (7 at place 1 of row 0, the first of two), 2 2 2 2 (place 2),
    0 0 0 3 (row 3, column 1: place 16), 4 0 5 5 (row 3, column 2: place 17).
    """
    x = torch.tensor([[1.0, 7, 2, 2, 9], [7, 0, 2, 2, 9], [0, 0, 4, 0, 9], [0, 3, 5, 5, 9]])[None, None]
    largest, places = pooling._largest_and_places(x)
    assert largest.tolist() == [[[[7, 2], [3, 5]]]]
    assert places.tolist() == [[[[1, 2], [16, 17]]]]


@pytest.mark.parametrize("shape", [(100, 6, 23, 25), (100, 6, 28, 28), (40, 15, 32, 32)], ids=str)
def test_the_way_back_from_slices(shape, monkeypatch):
    x, used = maps(*shape).requires_grad_(), []
    monkeypatch.setattr(pooling._Pooled, "apply", lambda *a, real=pooling._Pooled.apply: used.append(a[1]) or real(*a))
    theirs, ours = nn.MaxPool2d(2)(x), swift(2)(x)
    assert used == [True]
    assert torch.equal(ours, theirs)
    g = rng.normal(rng.key(0, "g"), tuple(theirs.shape))
    a, = torch.autograd.grad(theirs, x, g)
    b, = torch.autograd.grad(ours, x, g)
    assert torch.equal(a, b)
    assert a.stride() == b.stride()


@pytest.mark.parametrize("shape", [(3, 32, 23, 24), (60, 6, 28, 28)], ids=["turned", "by slices"])
def test_second_derivatives(shape):
    """d/dx Σ (dL/dx)² for L = Σ pool(x)²: what parts that differentiate through a gradient need."""
    x = maps(*shape).requires_grad_()
    results = []
    for layer in (nn.MaxPool2d(2), swift(2)):
        first, = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*results)
    assert bool(results[0].any())


@pytest.mark.parametrize(("shape", "window"),
                         [((80, 8, 24, 24), 3), ((50, 8, 24, 24), 2), ((2, 16, 8, 8), 2), ((9, 32, 32, 32), 2), ((32, 23, 24), 2)],
                         ids=["few channels", "too few for places", "little work", "pages apart", "no batch"])
def test_where_it_does_not_pay_pytorch_pools(shape, window, monkeypatch):
    monkeypatch.setattr(pooling._Pooled, "apply", lambda *a: pytest.fail("turned round"))
    monkeypatch.setattr(pooling, "_largest", lambda x: pytest.fail("slices"))
    x = maps(*shape).requires_grad_()
    assert torch.equal(swift(window)(x), F.max_pool2d(x, window))


def test_the_layer_stays_what_it_was():
    class Mine(nn.MaxPool2d):
        """A layer of somebody's own."""
    net = nn.Sequential(nn.MaxPool2d(2), Mine(2), nn.MaxPool2d(2, return_indices=True))
    heard = []
    net[0].register_forward_hook(lambda *a: heard.append(1))
    pool_swiftly(net)
    assert isinstance(net[0], nn.MaxPool2d)
    assert type(net[1]) is Mine
    net[1](net[0](maps(4, 32, 24, 24)))
    assert heard == [1]
    out, places = net[2](maps(4, 32, 23, 24))
    assert torch.equal(out, F.max_pool2d(maps(4, 32, 23, 24), 2))
    assert places.dtype == torch.int64
    assert not net.state_dict()


def test_inside_vmap_and_by_keyword():
    x = maps(3, 4, 32, 23, 24)
    assert torch.equal(torch.vmap(swift(2))(x), torch.vmap(nn.MaxPool2d(2))(x))
    assert torch.equal(swift(2)(input=x[0]), F.max_pool2d(x[0], 2))


def test_a_run_keeps_its_numbers(monkeypatch):
    """A round and an evaluation of FedAvg's CNN with the faster way and without it: equal bit for bit."""
    from consilience.core.federation import Federation
    from consilience.core.method import Method
    from consilience.core.policy import Policy
    from consilience.core.population import Population
    from consilience.data import as_float
    from consilience.engines import Sequential
    from consilience.metrics.accuracy import score_global
    from consilience.models import make
    x, y = rng.normal(rng.key(0, "x"), (60, 1, 28, 28)), rng.integers(rng.key(0, "y"), 10, (60,))

    def outcome() -> tuple[dict[str, torch.Tensor], object]:
        built = make("fedavg_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))
        population = Population(x, y, tuple(torch.arange(40).split(20)), 10, as_float)
        fed = Federation(built.module, built.layout, Method([]), population, Policy(lr=0.05, batch=10), Sequential)
        fed.round()
        return fed.model["params"], score_global(fed, [torch.arange(40, 60)], ["test"])
    turned = []
    monkeypatch.setattr("consilience.core.network.compute_together", lambda module: None)       # which would leave no pooling to do
    monkeypatch.setattr(pooling._Pooled, "apply", lambda *a, real=pooling._Pooled.apply: turned.append(1) or real(*a))
    ours, scores = outcome()
    assert turned
    monkeypatch.setattr("consilience.core.network.pool_swiftly", lambda module: None)
    theirs, same_scores = outcome()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert scores == same_scores


def test_the_average_over_positions_has_pytorchs_numbers():
    """Both ways, and the gradient of the gradient; the first is one number for all positions of a channel, not written out."""
    x = maps(3, 5, 4, 7).requires_grad_()
    g = rng.normal(rng.key(0, "g"), (3, 5, 1, 1)).requires_grad_()
    results = []
    for pool in (nn.AdaptiveAvgPool2d(1), pooling.average):
        out = pool(x)
        back, = torch.autograd.grad(out, x, g, create_graph=True)
        results.append((out, back, *torch.autograd.grad((back ** 3).sum(), g, retain_graph=True)))
    (out, back, again), (our_out, our_back, ours_again) = results
    assert torch.equal(our_out, out)
    assert torch.equal(our_back, back)
    torch.testing.assert_close(ours_again, again)                    # divided before the sum, or after it
    assert our_back.stride()[2:] == (0, 0)
    assert our_out.stride() == out.stride()
    turned = x.detach().contiguous(memory_format=torch.channels_last)
    assert pooling.average(turned).stride() == nn.AdaptiveAvgPool2d(1)(turned).stride()


def test_on_cpus_pytorch_averages(monkeypatch):
    monkeypatch.setattr(pooling._Averaged, "apply", lambda *a: pytest.fail("ours"))
    layer = nn.AdaptiveAvgPool2d(1)
    pool_swiftly(layer)
    assert type(layer) is pooling.AdaptiveAvgPool2d
    assert torch.equal(layer(maps(3, 5, 4, 4)), maps(3, 5, 4, 4).mean((2, 3), keepdim=True))


def test_the_average_can_be_differentiated_twice_and_stays_out_of_vmap(monkeypatch):
    used, x = [], maps(3, 5, 4, 4)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    monkeypatch.setattr(pooling._Averaged, "apply", lambda x: used.append(1) or x.mean((2, 3), keepdim=True))
    layer = nn.AdaptiveAvgPool2d(1)
    pool_swiftly(layer)
    with differentiable_twice():
        layer(x)
        assert used == [1]
        torch.vmap(layer)(x[None])
    assert used == [1]


# on a GPU, or in Triton's interpreter: `make test-kernels`

WINDOWS = [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 2, 2), (3, 3, 0), (2, 3, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", [(3, 8, 7, 6), (2, 5, 5, 9), (64, 64, 16, 16)], ids=str)
def test_kernels_pool_as_pytorch_does(shape, window, dtype):
    """Ties, which maps after a ReLU are full of, and not-a-number included."""
    needs_kernels()
    if INTERPRETED and shape[0] == 64:
        shape = (2, 64, 16, 16)
    x = maps(*shape).to(dtype).to(DEVICE).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 3] = float("nan")
    x[1, :, :3, :3] = float("-inf")
    x.requires_grad_()
    theirs = F.max_pool2d(x.float(), *window)
    ours = max_pool.max_pool(x, *window)
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert ours.stride() == theirs.stride()
    g = rng.normal(rng.key(0, "g"), tuple(theirs.shape)).to(dtype).to(DEVICE)
    wide, = torch.autograd.grad(theirs, x, g.float())
    back, = torch.autograd.grad(ours, x, g)
    once = 2.0**-7 if dtype == torch.bfloat16 else 1e-6                    # sums of float32, rounded once or, in the interpreter, cut off
    torch.testing.assert_close(back, wide, rtol=once, atol=1e-6)
    assert torch.equal(back == 0, wide == 0)


@pytest.mark.gpu
def test_by_hand_the_way_back_adds_what_windows_share():
    """Windows of 3, one apart, over 1 3 2: the middle is the largest of both padded and whole windows; it gets all of 1 + 2 + 4."""
    needs_kernels()
    if COMPILED:
        pytest.skip("needs a launch")
    x = torch.tensor([1.0, 3.0, 2.0], device=DEVICE).expand(1, 2, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = max_pool.max_pool(x, 3, 1, 1)
    assert out[0, 0].tolist() == [[3.0] * 3] * 3
    g = torch.tensor([1.0, 2.0, 4.0], device=DEVICE).expand(1, 2, 3, 3).contiguous()
    back, = torch.autograd.grad(out, x, g)
    # of equal rows the first that a window holds wins: row 0 for the windows of rows 0 and 1, row 1 for those of row 2
    assert back[0, 0].tolist() == [[0.0, 14.0, 0.0], [0.0, 7.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("settings", "fits"), [((3, 2, 1), True), ((2,), True), (((3, 2), 2), False), ((16,), False)], ids=str)
def test_what_the_kernels_take(settings, fits):
    layer = nn.MaxPool2d(*settings)
    how = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode

    class OnGpu:
        """As much of a tensor on a GPU as is looked at."""

        is_cuda, dtype, shape = True, torch.float32, (2, 3, 20, 20)
        dim, numel = (lambda self: 4), (lambda self: 2400)
        is_contiguous = lambda self, memory_format=torch.contiguous_format: memory_format is torch.channels_last
    assert max_pool.usable(OnGpu(), *how) is (fits and max_pool.triton is not None)
    assert not max_pool.usable(maps(2, 3, 20, 20).contiguous(memory_format=torch.channels_last), *how)


@pytest.mark.gpu
def test_on_a_gpu_all_positions_become_one(monkeypatch):
    needs_cuda()
    used = []
    monkeypatch.setattr(pooling._Averaged, "apply", lambda *a, real=pooling._Averaged.apply: used.append(1) or real(*a))
    for size, ours in ((1, True), ((1, 1), True), (2, False), ((None, 1), False)):
        layer, used[:] = nn.AdaptiveAvgPool2d(size), []
        x = maps(3, 5, 4, 4).cuda().requires_grad_()
        theirs = layer(x)
        pool_swiftly(layer)
        assert torch.equal(layer(x), theirs)
        assert bool(used) is ours
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (theirs, layer(x))))
