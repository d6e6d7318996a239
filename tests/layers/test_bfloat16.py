"""bfloat16: weights cast all at once give autocast's numbers, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from consilience import rng, tree
from consilience.channels_last import turned
from consilience.core.layout import Layout
from consilience.core.network import Network
from consilience.core.part import Part, Spec
from consilience.core.step_view import StepView
from consilience.kernels import sgd
from consilience.layers import bfloat16
from consilience.models import make
from consilience.testing import differences, run_tiny
from consilience.tree import Tree


@pytest.fixture(autouse=True)
def no_layer_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "SMALL", 0)


class Odd(nn.Module):
    """Tied weights, a layer that runs twice, one that never runs, a weight read by another than its layer, a module of unknown type."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular")
        self.turn = nn.ConvTranspose2d(8, 8, 2, stride=2, bias=False)
        self.twice = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.twice.weight
        self.never = nn.Linear(3, 3)
        self.scale = Scale()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.turn(F.relu(self.lift(x)))).mean((2, 3))
        x = self.tied(F.relu(self.twice(F.relu(self.twice(x)))))
        return self.head(self.scale(x)) + self.head.weight.square().sum(1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def model_of(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {"params": {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()},
            "buffers": {k: b.clone() for k, b in module.named_buffers()}}


def by_autocast(module: nn.Module, model: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    tied = {"tied.weight": "twice.weight"} if isinstance(module, Odd) else {}
    params = {**model["params"], **{k: model["params"][v] for k, v in tied.items()}}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return torch.func.functional_call(module, {**params, **model["buffers"]}, (x,)).float()


def odd() -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Odd(), rng.normal(rng.key(0), (6, 2, 4, 4))


def named(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    return (make(name, sample=shape, classes=10, key=rng.key(0, "m")).module, rng.normal(rng.key(1), (4, *shape)))


MODELS = {"odd": odd, "fedavg_cnn": lambda: named("fedavg_cnn", (1, 28, 28)),
          "resnet18": lambda: named("resnet18(stem='3x3')", (3, 16, 16)), "mnist_cnn": lambda: named("mnist_cnn", (1, 28, 28))}
CHAINED = ("fedavg_cnn",)        # convolution, ReLU and pooling in a row, computed with the channels together


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("last", [False, True])
def test_logits_and_gradients_are_autocasts(name: str, last: bool) -> None:
    module, x = MODELS[name]()
    form = torch.channels_last if last else torch.contiguous_format
    module, x = module.to(memory_format=form), x.contiguous(memory_format=form)      # type: ignore[call-overload]
    network, model = Network(copy.deepcopy(module), half=True), model_of(module)
    theirs_x = turned(x) if name in CHAINED else x      # in another layout than ours autocast may add up in another order
    frozen = next(iter(model["params"]))
    for turn in range(3):                     # the first pass learns which layers run; in the third the first weight is frozen
        model["params"][frozen].requires_grad_(turn < 2)
        keys = [k for k, p in model["params"].items() if p.requires_grad]
        leaves, seen = [model["params"][k] for k in keys], []
        for logits in (network.forward(model, x, train=True).logits, by_autocast(module, copy.deepcopy(model), theirs_x)):
            seen.append(logits)
        ours = torch.autograd.grad(seen[0].square().sum(), leaves, materialize_grads=True)
        again = by_autocast(module, model, theirs_x)
        theirs = torch.autograd.grad(again.square().sum(), leaves, materialize_grads=True)
        assert torch.equal(seen[0], seen[1])
        for key, a, b in zip(keys, ours, theirs):
            assert a.dtype == b.dtype == torch.float32
            assert torch.equal(a, b), (turn, key)


def test_most_weights_are_cast_together() -> None:
    module, x = odd()
    network, model = Network(module, half=True), model_of(module)
    network.forward(model, x)
    sizes = []
    original = bfloat16.cast

    def counted(tensors: object, dtype: torch.dtype) -> list[Tensor]:
        out = original(tensors, dtype)      # type: ignore[arg-type]
        sizes.append((len(out), dtype))
        return out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bfloat16, "cast", counted)
        logits = network.forward(model, x, train=True).logits
        torch.autograd.grad(logits.sum(), list(model["params"].values()), materialize_grads=True)
        with torch.no_grad():
            network.forward(model, x)
    # lift's two, turn's one, two each of twice, tied and head; never's have no place
    assert sizes == [(9, torch.bfloat16), (9, torch.float32), (9, torch.bfloat16)]
    assert all(layer._seen.ready is None for layer in module.modules() if isinstance(layer, bfloat16._Ready))


def test_a_submodule_run_alone_stays_in_float32() -> None:
    module, x = odd()
    network, model = Network(module, half=True), model_of(module)
    network.forward(model, x)
    z = rng.normal(rng.key(2), (5, 8))
    out = network.apply(model, "head", z)
    assert torch.equal(out, F.linear(z, model["params"]["head.weight"], model["params"]["head.bias"]))
    assert out.dtype == torch.float32


def test_a_loss_on_an_attached_layer_does_not_reach_the_model() -> None:
    # the graph of the pass must survive the adversary's own step, which frees what it walked
    module, x = odd()
    network, model = Network(module, ["head:input"], half=True), model_of(module)
    network.forward(model, x)
    trace = network.forward(model, x, train=True)
    own = [model["params"]["never.weight"], model["params"]["never.bias"]]
    aside = network.apply(model, "never", trace.before["head:input"][:, :3]).sum()
    torch.autograd.grad(aside, own)
    grads = torch.autograd.grad(trace.logits.sum(), [model["params"]["lift.weight"]])
    assert grads[0].abs().sum() > 0


def test_gradients_of_gradients() -> None:
    module, x = odd()
    network, model = Network(copy.deepcopy(module), half=True), model_of(module)
    network.forward(model, x)
    weight, seen = model["params"]["head.weight"], []
    for logits in (network.forward(model, x, train=True).logits, by_autocast(module, model, x)):
        (grad,) = torch.autograd.grad(logits.square().sum(), weight, create_graph=True)
        seen.append(torch.autograd.grad(grad.square().sum(), weight)[0])
    assert torch.equal(*seen)


def small_maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 3))


def test_kernels_larger_than_their_maps_are_cut() -> None:
    """2 × 2 images: the first convolution sees four of its nine places, the second, on one position, one. Nearly autocast's numbers, zeros
    where nothing is in reach, and the float32 weights stay whole."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = small_maps()
    network, model, x = Network(copy.deepcopy(module), half=True), model_of(module), rng.normal(rng.key(0), (5, 2, 2, 2))
    network.forward(model, x)                                # learns which layers run, on which maps
    sizes = []
    ours, theirs = network.forward(model, x, train=True).logits, by_autocast(module, model, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", lambda x, w, *more, real=F.conv2d: sizes.append(tuple(w.shape[2:])) or real(x, w, *more))
        network.forward(model, x)
    assert sizes == [(2, 2), (1, 1)]
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    weights = [model["params"][k] for k in ("0.weight", "2.weight")]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (ours, theirs))):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
        assert torch.equal(a == 0, b == 0)
        assert bool((a == 0).any())


def test_maps_of_another_size_have_the_whole_kernel() -> None:
    """Weights that are cut for one size are not used for another: the pass that first sees it gives autocast's numbers, bit for bit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = small_maps()
    network, model = Network(copy.deepcopy(module), half=True), model_of(module)
    for side in (2, 2, 6, 6, 2):
        x = rng.normal(rng.key(side), (5, 2, side, side))
        ours, theirs = network.forward(model, x, train=True).logits, by_autocast(module, model, x)
        if side == 6:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_what_a_layer_computes_does_not_depend_on_maps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a process, and the first on another size, convolve by what all later ones do: rounding may depend on it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = small_maps()
    network, model, seen = Network(module, half=True), model_of(module), {}
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(F, "conv2d", lambda x, w, *more, real=F.conv2d: sizes.append(tuple(w.shape[2:])) or real(x, w, *more))
    for side in (2, 2, 6, 2, 2, 1, 2):
        sizes.clear()
        logits = network.forward(model, rng.normal(rng.key(side), (5, 2, side, side)), train=True).logits
        found = *sizes, logits, *torch.autograd.grad(logits.square().sum(), [*model["params"].values()])
        for a, b in zip(found, seen.setdefault(side, found)):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, side
    assert [seen[side][:2] for side in (1, 2, 6)] == [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((3, 3), (3, 3))]


class Saving(nn.Module):
    """Computes its maps again on the way back instead of keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_maps()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_cut_kernels_are_cut_where_maps_are_computed_again() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Saving()
    found = []
    for saving, start in ((Network(module, half=True), ""), (Network(copy.deepcopy(module.body), half=True), "body.")):
        model = model_of(module)
        if start:
            model["params"] = {k.removeprefix(start): p for k, p in model["params"].items()}
        for _ in range(2):
            logits = saving.forward(model, rng.normal(rng.key(0), (5, 2, 2, 2)), train=True).logits
            found.append(torch.autograd.grad(logits.square().sum(), [*model["params"].values()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0.02, atol=1e-3)


def test_gradients_of_gradients_of_cut_kernels() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = small_maps()
    network, model, x = Network(copy.deepcopy(module), half=True), model_of(module), rng.normal(rng.key(0), (5, 2, 2, 2))
    network.forward(model, x)
    weight, seen = model["params"]["2.weight"], []
    for logits in (network.forward(model, x, train=True).logits, by_autocast(module, model, x)):
        (grad,) = torch.autograd.grad(logits.square().sum(), weight, create_graph=True)
        seen.append(torch.autograd.grad(grad.square().sum(), weight)[0])
    torch.testing.assert_close(*seen, rtol=0.1, atol=0.02)
    assert torch.equal(seen[0] == 0, seen[1] == 0)


class Peeking(nn.Module):
    """Looks at the kernel of one of its layers itself."""

    def __init__(self, look: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.body, self.look = small_maps(), look

    def forward(self, x: Tensor) -> Tensor:
        self.look(self)
        return self.body(x)


@pytest.mark.parametrize(("look", "side", "noticed"), [
    (lambda m: m.body[2].weight.detach().sum(), 2, True), (lambda m: m.body[2].weight.data.sum(), 2, True),
    (lambda m: torch.stack([p.detach().sum() for p in m.parameters()]), 2, True), (lambda m: torch.cat([m.body[2].weight]), 2, True),
    (lambda m: (m.body[2].weight.shape, m.body[2].weight.device, m.body[2].weight.numel()), 2, False),
    (lambda m: m.body[5].weight.detach().sum(), 2, False),                   # all of it is in use
    (lambda m: m.body[2].weight.detach().sum(), 8, False),                   # here too
    (lambda m: None, 2, False),
], ids=["detached", "data", "all", "joined", "form", "linear", "larger maps", "none"])
def test_a_module_that_reads_cut_kernels_itself_is_noticed(look: Callable[[nn.Module], object], side: int, noticed: bool,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    module = Peeking(look)
    network = Network(module, half=True)
    for on_gpu in (False, True):                                             # where alone steps can be put off
        monkeypatch.setattr(sgd, "usable", lambda params, usable=on_gpu: usable)
        network.probe(model_of(module), rng.normal(rng.key(0), (2, 2, side, side)))
        assert network.reads_kernels is (noticed and on_gpu)


def test_small_linear_layers_stay_in_float32_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 × 64 + 64 and 64 × 10 + 10 weights: with room for 640 only the second is small. What enters it is the first's bfloat16."""
    monkeypatch.setattr(bfloat16, "SMALL", 640)
    module = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    plain, model, x = copy.deepcopy(module), model_of(module), rng.normal(rng.key(0), (6, 512))
    network = Network(module, half=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        z = F.relu(F.linear(x, plain[0].weight, plain[0].bias))
    assert z.dtype == torch.bfloat16
    want = F.linear(z.float(), plain[2].weight, plain[2].bias)
    for _ in range(2):
        logits = network.forward(model, x, train=True).logits
        assert torch.equal(logits, want)
    grads = torch.autograd.grad(logits.square().sum(), list(model["params"].values()))
    theirs = torch.autograd.grad(want.square().sum(), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(grads, theirs))


def test_listening_to_maps_changes_no_number() -> None:
    """Maps after a shortcut's sum were float32 from the first point on that somebody listened to."""
    built = make("resnet18(stem='3x3')", sample=(3, 8, 8), classes=4, key=rng.key(0, "m"))
    x, model = rng.normal(rng.key(0, "x"), (3, 3, 8, 8)), model_of(built.module)
    stages = built.layout.stages
    heard, alone = (Network(copy.deepcopy(built.module), points, half=True).forward(model, x) for points in (stages, ()))
    assert torch.equal(heard.logits, alone.logits)
    assert {heard.before[point].dtype for point in stages} == {torch.float32}        # who looks at one gets float32


def test_maps_are_float32_however_they_are_looked_at() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten())
    trace = Network(module, ("0",), half=True).forward(model_of(module), torch.ones(2, 1, 2, 2))
    for shown in (trace.before, trace.after):
        assert [shown["0"].dtype, shown.get("0").dtype, *(t.dtype for t in shown.values()), *(t.dtype for _, t in shown.items()),
                dict(shown)["0"].dtype] == [torch.float32] * 5
        assert shown.data["0"].dtype == torch.bfloat16
    assert [t.before.data["0"].dtype for t in trace.split([1, 1])] == [torch.bfloat16] * 2


@pytest.mark.parametrize("flat", [False, True])
def test_what_taps_make_of_a_map_goes_on_as_it_came(flat: bool) -> None:
    """1 + 2⁻¹⁰ is 1 in bfloat16. A vector keeps its bits, for a head that computes in float32; a map does not. Taps get it as it is."""
    module = nn.Sequential(nn.Flatten() if flat else nn.Identity(), nn.Identity())
    entered: list[Tensor] = []
    module[1].register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    network = Network(module, ("0",), half=True)
    x = torch.ones(2, 1, 2, 2, dtype=torch.bfloat16)
    came: list[torch.dtype] = []
    trace = network.forward(model_of(module), x, tap=lambda trace, point, seen: came.append(seen.dtype) or seen.float() + 2.0**-10)
    assert came == [torch.float32 if flat else torch.bfloat16]
    assert torch.equal(trace.after["0"], torch.full_like(trace.after["0"], 1 + 2.0**-10))
    assert (entered[0].dtype, entered[0].flatten()[0].item()) == ((torch.float32, 1 + 2.0**-10) if flat else (torch.bfloat16, 1.0))


class Looker(Part):
    name = "looker"
    seen: ClassVar[set[torch.dtype]] = set()

    def points(self, layout: Layout) -> tuple[str, ...]:
        return layout.stages

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        if x.dim() == 4:
            self.seen.add(x.dtype)
        return x


class Narrow(Looker):
    name, narrow_maps = "narrow", True
    seen: ClassVar[set[torch.dtype]] = set()


def test_parts_get_maps_in_float32_unless_they_take_bfloat16() -> None:
    """And what they leave as it is goes on as it was."""
    both = run_tiny([Looker(), Narrow()], precision="bfloat16")
    assert (Looker.seen, Narrow.seen) == ({torch.float32}, {torch.bfloat16})
    assert not differences(both, run_tiny(precision="bfloat16"))


class Blend(Part):
    """Trains its own model in the main loss: by itself, or half and half with the one in training."""

    name = "blend"
    portion = 0.5

    def init_personal(self, spec: Spec) -> Tree:
        return {"params": tree.clone(spec.model["params"])}

    def main_loss(self, v: StepView) -> Tensor:
        own = v.personal["params"]
        params = own if self.portion == 1 else {k: self.portion * p + (1 - self.portion) * v.params[k] for k, p in own.items()}
        seen = v.forward({"params": params, "buffers": v.model["buffers"]}, v.batch.x, train=True, label=self.name, learn=True)
        return v.task_loss(seen.logits, v.batch.target)


@pytest.mark.parametrize("portion", [1.0, 0.5])
def test_a_parts_own_model_learns(portion: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only gradients of the weights in training are collected: those of others, and of what is mixed from them, are autograd's."""
    monkeypatch.setattr(Blend, "portion", portion)
    moved = []
    for precision in ("float32", "bfloat16"):
        fed = run_tiny([Blend()], precision=precision, momentum=0.0)
        own = fed.client(0).tensors["personal"]["blend"]["params"]
        moved.append(torch.cat([(p - fed.spec.model["params"][k]).flatten() for k, p in own.items()]))
    torch.testing.assert_close(moved[1], moved[0], rtol=0.1, atol=0.1 * moved[0].abs().max().item())
    assert moved[0].abs().max() > 1e-3
