"""Normalisation computed together with its neighbours gives what the layers give one by one.

The tests of the kernels need a CUDA device, or Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import rng
from consilience.core.network import Network, staged
from consilience.kernels import batch_norm, group_norm
from consilience.layers import norms
from consilience.layers.norms import norm_relu, relu_norm
from consilience.layers.pooling import average
from consilience.layers.stages import Chain, compute_together
from consilience.models import make
from kernel_device import DEVICE, INTERPRETED, ON_HOST, needs_cuda, needs_kernels
from listening import LISTEN

HALF = 2.0**-7 if INTERPRETED else 2.0**-8              # one rounding to bfloat16; the interpreter cuts off
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# a batch of 64 in ResNet-18 with its 7×7 stem on 32×32 (the stem's own maps fifth), then with the 3×3 stem
RESNET = [(64, 64, 8, 8), (64, 128, 4, 4), (64, 256, 2, 2), (64, 512, 1, 1), (64, 64, 16, 16), (64, 64, 32, 32)]
ODD = [(6, 10, 5, 4), (5, 3, 1, 1), (9, 24), (3, 70, 7, 7)]
GROUPS = [(32, 64, 28, 28), (32, 128, 14, 14), (5, 24, 5, 4), (70, 16, 3, 3)]
if INTERPRETED:             # a program at a time, in Python: the same kernels on fewer samples
    RESNET = [(4, 16, 8, 8), (6, 24, 4, 4), (8, 40, 2, 2), (64, 32, 1, 1), (2, 6, 32, 32)]
    ODD = [(6, 10, 3, 2), (5, 3, 1, 1), (9, 24), (3, 70, 3, 2)]
    GROUPS = [(2, 64, 14, 14), (2, 128, 7, 7), (5, 24, 5, 4), (70, 16, 3, 3)]


def normal(shape: tuple[int, ...], name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return rng.normal(rng.key(0, name), shape).to(dtype).to(device)


def normed(channels: int, dims: int = 4) -> nn.Module:
    norm = nn.BatchNorm2d(channels, momentum=0.3) if dims == 4 else nn.BatchNorm1d(channels, momentum=0.3)
    with torch.no_grad():
        norm.weight.copy_(rng.uniform(rng.key(1, "weight"), (channels,)) + 0.5)
        norm.bias.copy_(normal((channels,), "bias"))
        norm.running_mean.copy_(normal((channels,), "mean"))
    return norm


# without kernels

def test_without_kernels_the_layers_run() -> None:
    x, add, norm, twin = normal((5, 6, 3, 3), "x"), normal((5, 6, 3, 3), "add"), normed(6), normed(6)
    assert torch.equal(norm_relu(norm, x), F.relu(twin(x)))
    assert torch.equal(norm_relu(norm, x, add), F.relu(twin(x) + add))
    assert torch.equal(norm_relu(norm, x, add, relu=False), twin(x) + add)
    assert norm.num_batches_tracked.item() == 3
    assert torch.equal(norm.running_mean, twin.running_mean)
    group = nn.GroupNorm(2, 6)
    assert torch.equal(norm_relu(group, x), F.relu(group(x)))
    assert torch.equal(relu_norm(group, x), group(F.relu(x)))


def test_a_chain_is_a_sequential() -> None:
    layers = [nn.Conv2d(3, 6, 3), normed(6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.GroupNorm(2, 6), normed(6), nn.Flatten()]
    x = normal((4, 3, 5, 5), "x")
    states = {}
    for kind in (nn.Sequential, Chain):
        chain = kind(*layers)
        chain[1].reset_running_stats()
        chain[6].reset_running_stats()
        states[kind] = chain(x), {k: v.clone() for k, v in chain.state_dict().items()}
    assert torch.equal(states[nn.Sequential][0], states[Chain][0])
    for key, value in states[nn.Sequential][1].items():
        assert torch.equal(value, states[Chain][1][key]), key


def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that kernels are there; what they were asked for."""
    asked: list[str] = []
    monkeypatch.setattr(batch_norm, "usable", lambda norm, x, add: True)
    monkeypatch.setattr(group_norm, "usable", lambda norm, x: True)
    monkeypatch.setattr(batch_norm, "norm_relu", lambda norm, x, add, relu: asked.append(f"norm{'+relu' if relu else ''}") or x)
    monkeypatch.setattr(group_norm, "relu_norm", lambda norm, x: asked.append("relu+group") or x)
    return asked


def test_which_layers_of_a_chain_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, x = fused(monkeypatch), normal((4, 6, 5, 5), "x")
    chain = Chain(nn.BatchNorm2d(6), nn.ReLU(), nn.ReLU(), nn.GroupNorm(2, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.BatchNorm2d(6))
    chain(x)
    assert asked == ["norm+relu", "relu+group", "norm"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("listen", LISTEN)
def test_a_layer_that_somebody_listens_to_runs_by_itself(monkeypatch: pytest.MonkeyPatch, place: int, listen: str) -> None:
    asked, x = fused(monkeypatch), normal((4, 6, 5, 5), "x").requires_grad_()
    chain = Chain(nn.BatchNorm2d(6), nn.ReLU(), nn.ReLU(), nn.GroupNorm(2, 6))
    heard: list[int] = []
    LISTEN[listen](chain[place], lambda: heard.append(place))
    chain(x).sum().backward()
    assert heard == [place]
    assert asked == [["relu+group"], ["norm", "relu+group"], ["norm+relu"], ["norm+relu"]][place]


class PreActivation(nn.Module):
    """A shortcut around a chain whose first layer works in place: what is added is relu(x)."""

    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), nn.GroupNorm(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x


@pytest.mark.parametrize("first", [None, nn.Identity, nn.Flatten])
def test_a_relu_in_place_shows_in_the_shortcut_around_it(first: type[nn.Module] | None) -> None:
    x = normal((3, 4), "x") if first is nn.Flatten else normal((2, 4, 3, 3), "x")
    module = PreActivation(*([] if first is None else [first()]))
    theirs = module(x.clone())
    assert torch.equal(theirs, module.body[-1](F.relu(x)) + F.relu(x))
    compute_together(module)
    assert torch.equal(module(x.clone()), theirs)


def test_a_relu_in_place_on_what_nobody_else_holds_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, x = fused(monkeypatch), normal((4, 6, 5, 5), "x")
    conv = nn.Conv2d(6, 6, 1)
    chain = Chain(conv, nn.ReLU(inplace=True), nn.GroupNorm(2, 6))
    chain(x)
    assert asked == ["relu+group"]
    kept: list[Tensor] = []
    conv.register_forward_hook(lambda layer, args, out: kept.append(out))
    chain(x)
    assert asked == ["relu+group"]
    assert kept[0].min() == 0                       # the listener holds the tensor that the ReLU then wrote to


class MyNorm(nn.BatchNorm2d):
    """A user's own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_a_users_own_norms_and_activations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capped(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).clamp(max=0.1)
    asked, x = fused(monkeypatch), normal((4, 6, 5, 5), "x")
    chain = Chain(MyNorm(6), Capped(), nn.GroupNorm(2, 6))
    assert torch.equal(chain(x), nn.Sequential(*chain)(x))
    assert torch.equal(norm_relu(chain[0], x), F.relu(chain[0](x)))
    assert not asked


def test_nothing_goes_together_inside_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, x = nn.Sequential(nn.BatchNorm2d(6).eval(), nn.ReLU(), nn.ReLU(), nn.GroupNorm(2, 6)), normal((3, 4, 6, 5, 5), "x")
    theirs, asked = torch.vmap(chain)(x), fused(monkeypatch)
    compute_together(chain)
    assert torch.equal(torch.vmap(chain)(x), theirs)
    assert torch.equal(torch.vmap(lambda t: norm_relu(chain[0], t))(x), torch.vmap(lambda t: F.relu(chain[0](t)))(x))
    assert not asked


def test_what_the_kernels_do_not_know_stays_with_pytorch() -> None:
    x = normal((5, 6, 3, 3), "x")
    assert not batch_norm.usable(normed(6), x, None)                     # in the memory of the host
    assert not group_norm.usable(nn.GroupNorm(2, 6), x)


# the kernels

def near(ours: Tensor, exact: Tensor, within: float, what: object) -> None:
    assert ours.shape == exact.shape, what
    error = (ours.double() - exact).abs().max().item()
    assert error <= within * max(exact.abs().max().item(), 1e-3), (what, error, exact.abs().max().item())


def compare_batch(shape: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype, relu: bool, added: torch.dtype | None) -> None:
    """The kernels against PyTorch's layers in float64, on the same numbers; the ReLU's gradient takes the side of 0 that ours took."""
    norm = normed(shape[1], len(shape)).to(DEVICE)
    exact = normed(shape[1], len(shape)).to(DEVICE).double()
    x = normal(shape, "x", dtype, DEVICE) * 2 + 3
    if len(shape) == 4:
        x = x.contiguous(memory_format=layout)
    x.requires_grad_()
    add = None if added is None else normal(shape, "add", added, DEVICE).requires_grad_()
    weight = normal(shape, "weight", torch.bfloat16, DEVICE)
    y = batch_norm.norm_relu(norm, x, add, relu)
    assert y.dtype == (dtype if added is None else torch.promote_types(dtype, added))
    assert y.stride() == x.stride()
    leaves = [x, norm.weight, norm.bias] + ([] if add is None else [add])
    grads = torch.autograd.grad((y.float() * weight).sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in (x, *(() if add is None else (add,)))]
    z = exact(wide[0]) + (0 if add is None else wide[1])
    rounding = 1e-5 if dtype == torch.float32 else HALF
    near(y, F.relu(z) if relu else z, 1e-5 if y.dtype == torch.float32 else HALF, "y")
    z = z * (y > 0) if relu else z
    theirs = torch.autograd.grad((z * weight).sum(), [wide[0], exact.weight, exact.bias, *wide[1:]])
    for what, ours, their in zip(("dx", "dweight", "dbias", "dadd"), grads, theirs):
        near(ours, their, 1e-5 if what in ("dweight", "dbias") else rounding, what)
    near(norm.running_mean, exact.running_mean, 1e-5, "running mean")
    near(norm.running_var, exact.running_var, 1e-5, "running variance")
    assert norm.num_batches_tracked.item() == 1
    norm.eval()
    exact.eval()
    with torch.no_grad():
        z = exact(wide[0]) + (0 if add is None else wide[1])
        near(batch_norm.norm_relu(norm, x, add, relu), F.relu(z) if relu else z, 1e-5 if y.dtype == torch.float32 else HALF, "scored")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", RESNET, ids=lambda s: "x".join(map(str, s)))
def test_batch_norm_kernels_at_resnets_sizes(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    needs_kernels()
    compare_batch(shape, LAYOUTS[layout], dtype, True, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [1 << 17, 64], ids=["alone", "shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ODD, ids=lambda s: "x".join(map(str, s)))
def test_batch_norm_kernels_at_odd_sizes(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], layout: str, alone: int) -> None:
    needs_kernels()
    monkeypatch.setattr(batch_norm, "ALONE", alone)
    for dtype in (torch.float32, torch.bfloat16):
        for relu, added in ((True, None), (True, dtype), (False, None), (False, dtype), (True, torch.float32)):
            compare_batch(shape, LAYOUTS[layout], dtype, relu, added)


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [1 << 17, 64], ids=["alone", "shared"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_kernels_over_many_tiles(monkeypatch: pytest.MonkeyPatch, layout: str, alone: int) -> None:
    # 100 positions of 10 channels; tiles of 4 or 8 positions (channels_last) or 64, the last of them with 36; up to three shares
    needs_kernels()
    monkeypatch.setattr(batch_norm, "ALONE", alone)
    monkeypatch.setattr(batch_norm, "TILE", 64)
    monkeypatch.setattr(batch_norm, "BACK_TILE", 64)
    monkeypatch.setattr(batch_norm, "SHARES", 3)
    for dtype in (torch.float32, torch.bfloat16):
        compare_batch((5, 10, 5, 4), LAYOUTS[layout], dtype, True, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", GROUPS, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
def test_group_norm_kernels(shape: tuple[int, ...], layout: str, dtype: torch.dtype, biased: bool, pooled: bool) -> None:
    """With and without the bias of a convolution before the ReLU, and an average over positions behind. Maps keep their type."""
    needs_kernels()
    group = nn.GroupNorm(8, shape[1]).to(DEVICE)
    with torch.no_grad():
        group.weight.copy_(rng.uniform(rng.key(1, "weight"), (shape[1],)) + 0.5)
        group.bias.copy_(normal((shape[1],), "bias"))
    x = (normal(shape, "x", dtype, DEVICE) + 0.3).contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
    weight = normal((*shape[:2], 1, 1) if pooled else shape, "w", dtype, DEVICE)
    before = normal((shape[1],), "before", dtype, DEVICE).requires_grad_() if biased else None
    y = group_norm.relu_norm(group, x, before)
    assert y.stride() == x.stride()
    assert y.dtype == dtype
    end = average(y) if pooled else y
    grads = torch.autograd.grad(end, [x, group.weight, group.bias, *([] if before is None else [before])], weight)
    entered = x.detach() if before is None else (x + before[:, None, None]).detach()      # in bfloat16 rounded
    wide, exact = entered.double().requires_grad_(), nn.GroupNorm(8, shape[1]).to(DEVICE).double()
    exact.load_state_dict(group.state_dict())
    z = exact(F.relu(wide))
    narrow = dtype == torch.bfloat16
    alike = 4 * HALF if narrow and biased and INTERPRETED else 1e-5                        # it cuts off where PyTorch rounds what enters
    near(y, z, max(alike, HALF) if narrow else alike, "y")
    dx, *theirs = torch.autograd.grad(z.mean((2, 3), keepdim=True) if pooled else z, [wide, exact.weight, exact.bias], weight.double())
    if pooled and narrow:
        alike = max(alike, 2 * HALF)                  # the average's gradient is divided by the positions and rounded, what follows too
    near(grads[0], dx, max(alike, HALF) if narrow else 1e-5, "dx")
    for what, ours, their in zip(("dweight", "dbias", "dbefore"), grads[1:], (*theirs, dx.sum((0, 2, 3))), strict=False):
        near(ours, their, max(alike, 2 * HALF) if narrow and what == "dbefore" else alike, what)      # a sum of rounded numbers, rounded
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32, *([dtype] if biased else [])]


@pytest.mark.gpu
def test_a_frozen_norm_scores_and_leaves_its_statistics() -> None:
    """In eval within a training pass: the kernel where nothing asks for a gradient, PyTorch's layer where something does."""
    needs_kernels()
    norm, exact = normed(6).to(DEVICE).eval().requires_grad_(False), normed(6).to(DEVICE).eval().double()
    x, before = normal((5, 6, 3, 3), "x", device=DEVICE), {k: v.clone() for k, v in norm.state_dict().items()}
    near(batch_norm.norm_relu(norm, x, None, True), F.relu(exact(x.double())), 1e-5, "scored")
    assert all(torch.equal(v, norm.state_dict()[k]) for k, v in before.items())
    if not ON_HOST:                                 # the choice looks at the device
        assert batch_norm.usable(norm, x, None)
    assert not batch_norm.usable(norm, x.clone().requires_grad_(), None)


@pytest.mark.gpu
def test_kernels_are_used_in_models() -> None:
    needs_cuda()
    assert batch_norm.usable(normed(64).cuda(), torch.zeros(4, 64, 8, 8, device="cuda", dtype=torch.bfloat16), None)
    for dtype in (torch.float32, torch.bfloat16):
        assert group_norm.usable(nn.GroupNorm(8, 64).cuda(), torch.zeros(4, 64, 28, 28, device="cuda", dtype=dtype))
    assert not group_norm.usable(nn.GroupNorm(2, 64).cuda(), torch.zeros(4, 64, 56, 56, device="cuda"))      # 100,352 numbers a group
    assert norms.together(torch.zeros(4, 64, 8, 8, device="cuda"), [normed(64).cuda(), nn.ReLU()], 0)[0] == 2      # type: ignore[index]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "half"), [("resnet18(stem='3x3')", False), ("mnist_cnn", False), ("mnist_cnn", True)])
def test_a_model_with_the_kernels_learns_as_without(monkeypatch: pytest.MonkeyPatch, name: str, half: bool, layout: str) -> None:
    needs_cuda()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    sample = (1, 28, 28) if name == "mnist_cnn" else (3, 32, 32)
    x, seen = normal((16, *sample), "x", device="cuda").contiguous(memory_format=LAYOUTS[layout]), []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(batch_norm, "usable", lambda norm, x, add: False)
            monkeypatch.setattr(group_norm, "usable", lambda norm, x: False)
        module = make(name, sample=sample, classes=10, key=rng.key(0, "m")).module.cuda().to(memory_format=LAYOUTS[layout])
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        network, model = Network(staged(module), half=half), {"params": params, "buffers": buffers}
        logits = network.forward(model, x, train=True, update_buffers=True).logits
        grads = torch.autograd.grad(F.cross_entropy(logits, torch.arange(16, device="cuda") % 10), list(params.values()))
        with torch.no_grad():
            scored = network.forward(model, x).logits
        seen.append(({"logits": logits.detach(), "scored": scored, **buffers}, dict(zip(params, grads))))
    for key, theirs in seen[1][0].items():
        near(seen[0][0][key], theirs.double(), 2e-2 if half else 2e-3, key)      # 2**-8 where bfloat16 rounds to the other side
    for key, theirs in seen[1][1].items():            # changes of 3e-7 behind every norm flip ReLUs: gradients move by 0.5 % then
        assert (seen[0][1][key] - theirs).norm() <= (0.1 if half else 0.02) * theirs.norm(), key


@pytest.mark.gpu
def test_kernels_in_a_cuda_graph() -> None:
    needs_cuda()
    norm, eager = normed(64).cuda(), normed(64).cuda()
    x = normal((8, 64, 8, 8), "x", torch.bfloat16, "cuda").contiguous(memory_format=torch.channels_last).requires_grad_()

    def run(layer: nn.Module) -> list[Tensor]:
        y = norm_relu(layer, x, x)
        return [y.detach(), *torch.autograd.grad(y, [x, layer.weight, layer.bias], torch.ones_like(y))]
    for _ in range(3):
        theirs = run(eager)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run(norm)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = run(norm)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert norm.num_batches_tracked.item() == eager.num_batches_tracked.item() == 3
    for a, b in zip([*ours, norm.running_mean, norm.running_var], [*theirs, eager.running_mean, eager.running_var]):
        assert torch.equal(a, b)
