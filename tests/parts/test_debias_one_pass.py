"""FedBR with batch and pseudo-data in one pass, against the same with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.method import Method
from consilience.core.network import Network
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.slot import Slot, known_one
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.engines._pool import Pool
from consilience.engines.slots import Slots
from consilience.engines.workers import Workers
from consilience.models import MODELS, Built, make
from consilience.parts import parse_stack
from consilience.parts.kernels import fused
from consilience.testing import LAYOUT, ReplayedSequential, differences, largest_difference, tiny_population

# Whether a model's samples keep apart in training: BatchNorm mixes them, dropout tosses coins by the label of a pass.
APART = {"alexnet_bn": False, "cct": False, "digits_cnn": False, "drug_target": False, "fasttext": True, "fedavg_cnn": True,
         "har_cnn": True, "lenet5": True, "mlp": True, "mnist_cnn": True, "moon_cnn": True, "pfl_cnn": False, "resnet18": False,
         "resnet50": False, "unet": False, "vgg11": True}
TRAINED = [*(n for n, apart in APART.items() if apart and n != "fasttext"), "resnet18(norm='group')"]      # no words: FedBR averages inputs
ROUNDING = 5e-6             # of a tensor's largest number: float32 sums over samples in another order
SAMPLE = {"alexnet_bn": (3, 96, 96), "unet": (3, 32, 32)}


class GroupNet(nn.Module):
    """The tiny model with GroupNorm and LayerNorm in place of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.AvgPool2d(2))
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.ReLU())
        self.header = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.header(self.neck(self.stage1(x))))


def group_federation(stack: str, engine: Any = Sequential, device: str = "cpu", **how: Any) -> Federation:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = GroupNet()
    settings: dict[str, Any] = {"batch": 8, "lr": 0.1, "weights": "uniform", "last_batch": "keep"} | how
    return Federation(net, LAYOUT, Method(parse_stack(stack).parts), tiny_population((20, 17, 11)), Policy(**settings), engine, device)


def built(text: str) -> Built:
    family = MODELS[text.partition("(")[0]]
    return make(text, sample=SAMPLE.get(family.name, family.example[0]), classes=family.example[1], key=rng.key(0, "model"),
                vocabulary=family.vocabulary)


def in_two(fed: Federation) -> Federation:
    assert fed.program.hooks["main"]["beside"]
    fed.program.hooks["main"]["beside"] = []
    return fed


def compared(open_round: Any, one: Federation, two: Federation, steps: int) -> float:
    """Largest difference of a gradient or a loss, relative to the tensor's largest number, over a client's steps.

    The projection is compared by how far it moved. That is known to one rounding of its weights at either end, which is more
    than the rest of this comparison allows where it moves by a millionth of them.
    """
    worst = 0.0
    ends = 2 * torch.finfo(torch.float32).eps / ROUNDING
    rounds = [open_round(fed=fed) for fed in (one, in_two(two))]
    for _ in range(steps):
        a, b = (opened.step() for opened in rounds)
        assert a.grads.keys() == b.grads.keys()
        pairs = [(a.loss, b.loss), *((a.grads[k], b.grads[k]) for k in b.grads), *((a.terms[k], b.terms[k]) for k in b.terms)]
        scaled = [(x, y, y.abs().max()) for x, y in pairs]
        for k, w in a.before["model"]["params"].items():
            if k.startswith("debias."):
                scaled.append((a.moved(k), b.moved(k), b.moved(k).abs().max() + ends * w.abs().max()))
        worst = max([worst, *(float((x - y).abs().max() / scale.clamp_min(1e-8)) for x, y, scale in scaled)])
        for k, p in rounds[0].slot.model["params"].items():      # the next step starts from the same place
            p.data.copy_(rounds[1].slot.model["params"][k].data)
    return worst


RELEASED = "debias(projection=released)"


@pytest.mark.parametrize("stack", [RELEASED, "debias(projection=released,lam=0)", "debias(projection='none')", "debias(mu=0)",
                                   "debias(projection=released,pseudo=mixture)", "debias(projection=released,pseudo=mixture,mix=0)",
                                   f"scaffold+{RELEASED}", f"prox(mu=0.1)+{RELEASED}", f"moon+{RELEASED}", f"dyn+{RELEASED}",
                                   f"mixup+{RELEASED}"])
def test_losses_gradients_and_projection_are_those_of_two_passes(open_round: Any, stack: str) -> None:
    """Three steps of 8, 8 and 4 samples in round two."""
    one, two = group_federation(stack), group_federation(stack)
    one.round()
    two.round()                                                  # both with one pass: they start alike
    assert compared(open_round, one, two, steps=3) < ROUNDING


def test_the_stacks_of_the_presets_share_a_pass() -> None:
    for stack in ("fedbr", "scaffold+fedbr", "fedprox+fedbr"):
        assert group_federation(stack).program.hooks["main"]["beside"], stack
    for stack in ("sam+debias", "ffa+debias", "prbm+debias"):
        assert not group_federation(stack).program.hooks["main"]["beside"], stack


def test_every_model_is_known() -> None:
    assert APART.keys() == MODELS.keys()


@pytest.mark.parametrize("name", APART)
def test_which_models_keep_samples_apart(name: str) -> None:
    model = built(name)
    network = Network(model.module, [model.layout.features])
    shape = (2, *SAMPLE.get(name, MODELS[name].example[0]))
    words = MODELS[name].vocabulary
    x = torch.arange(torch.Size(shape).numel()).reshape(shape) % words if words else rng.normal(rng.key(1, "two"), shape)
    state = {"params": dict(model.module.named_parameters()), "buffers": dict(model.module.named_buffers())}
    assert network.keeps_samples_apart(state, x) == APART[name]


@pytest.mark.parametrize("text", TRAINED)
def test_every_such_model_trains_as_in_two_passes(open_round: Any, text: str) -> None:
    model, (shape, classes) = built(text), MODELS[text.partition("(")[0]].example
    x = rng.normal(rng.key(2, "pixels"), (8, *shape))
    population = Population(x, torch.arange(8) % classes, (torch.arange(4), torch.arange(4, 8)), classes, as_float)

    def fed() -> Federation:
        policy = Policy(batch=4, lr=0.01, epochs=1, weights="uniform")
        return Federation(model.module, model.layout, Method(parse_stack("fedbr").parts), population, policy, Sequential, "cpu")
    assert compared(open_round, fed(), fed(), steps=1) < ROUNDING


@pytest.mark.parametrize("stack", [RELEASED, f"scaffold+{RELEASED}"])
def test_a_recorded_step_can_be_repeated(stack: str) -> None:
    one, replayed = group_federation(stack), group_federation(stack, ReplayedSequential)
    for fed in (one, replayed):
        assert fed.program.hooks["main"]["beside"]
        fed.round()
        fed.round()
    assert not differences(one, replayed)


def test_switched_off_it_is_fedavg_bit_for_bit() -> None:
    one, other = group_federation("debias(mu=0,lam=0,projection='none')"), group_federation("fedavg")
    for fed in (one, other):
        fed.round()
        fed.round()
    for k, p in other.model["params"].items():
        assert torch.equal(one.model["params"][k], p), k


def test_a_slot_has_the_one_that_ways_back_start_from_but_on_a_cpu() -> None:
    """There autograd makes its own. Nor does the slot's serve losses of another type, shape or place."""
    zero = torch.zeros((), device="meta")                                          # stands for a GPU
    slot, host = (Slot(x, x, room=1) for x in (torch.zeros(1, device="meta"), torch.zeros(1)))
    one = slot.one_for(zero)
    assert one is slot.one_for(zero)
    assert getattr(one, "always_one", False)
    assert all(slot.one_for(loss) is None for loss in (zero.double(), zero[None], torch.zeros(())))
    assert host.one_for(torch.zeros(())) is None


def test_a_known_gradient_is_not_multiplied_by_the_steps_own_one() -> None:
    """Loss 3x at x = 2, gradient 3. From the 1 of a slot the gradient comes as it is; from any other number it is scaled."""
    x, three = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0])
    for start, same in ((known_one(x.device), True), (torch.ones(()), False), (torch.tensor(2.0), False)):
        seen: list[Tensor] = []
        twice = x.view_as(x)
        twice.register_hook(seen.append)
        total = torch.zeros(()) + fused.known(torch.tensor([6.0]), [twice], [three]) + 0.0         # as a step adds its terms
        grad, = torch.autograd.grad(total, [x], start)
        assert (seen[0].data_ptr() == three.data_ptr()) == same
        assert float(grad) == 3.0 * float(start)


def test_workers_compute_the_same_bit_for_bit() -> None:
    pool = Pool(1)
    try:
        one, other = group_federation(f"scaffold+{RELEASED}"), group_federation(f"scaffold+{RELEASED}", Workers.sharing(pool))
        for fed in (one, other):
            fed.round()
            fed.round()
        assert not differences(one, other)
    finally:
        pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("stack", [RELEASED, f"scaffold+{RELEASED}"])
def test_slots_compute_the_same_and_capture_it(stack: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    one, many, two = (group_federation(stack, engine, device="cuda") for engine in (Sequential, Slots, Sequential))
    in_two(two)
    for fed in (one, many, two):
        fed.round()
    assert largest_difference(one, many) <= 1e-5
    assert largest_difference(one, two) <= 1e-4
    assert many.engine.captured, many.engine.notes      # type: ignore[attr-defined]
