"""What a user's module does by itself stays so in a network: its own train(), its own forward, and whoever listens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from core_parts import federation, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from consilience import rng
from consilience.core.network import KeyedDropout, Network, staged
from consilience.layers.stages import Chain
from consilience.parts.dann import Dann
from consilience.parts.ntd import Ntd
from consilience.testing import ReplayedSequential, differences, tiny_population


class Frozen(nn.Module):
    """Keeps its normalisation in eval: the usual way to freeze statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head, self.asked = nn.Linear(256, 3), 0
        with torch.no_grad():
            self.body[1].running_mean.fill_(0.3)
            self.body[1].running_var.fill_(2.0)
        self.body[1].requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body[1].eval()
        self.asked += 1
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class FrozenChain(nn.Sequential):
    def train(self, mode: bool = True) -> FrozenChain:
        super().train(mode)
        self[1].eval()
        return self


def model_of(module: nn.Module) -> Any:
    return {"params": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}


# ---- train() ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("half", [False, True])
def test_frozen_statistics_stay_and_are_used(half: bool) -> None:
    module = seeded(Frozen)
    x = rng.normal(rng.key(1), (6, 1, 8, 8)) * 3 + 5
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs = copy.deepcopy(module).train()(x).float()
    network, model = Network(module, half=half), model_of(module)
    before = {k: v.clone() for k, v in model["buffers"].items()}
    out = network.forward(model, x, train=True, update_buffers=True).logits
    torch.testing.assert_close(out, theirs, **({"rtol": 0.02, "atol": 0.02} if half else {}))
    assert all(torch.equal(v, model["buffers"][k]) for k, v in before.items())
    assert [m.training for m in (module, module.body, module.body[0], module.body[1])] == [True, True, True, False]


def test_the_mode_is_set_where_it_changes() -> None:
    module = seeded(Frozen)
    network, model, x = Network(module), model_of(module), torch.ones(2, 1, 8, 8)
    module.asked = 0
    for train in (True, True, False, False, True):
        network.forward(model, x, train=train)
    assert module.asked == 3


@pytest.mark.parametrize("parts", [[], [Dann()]], ids=["plain", "attached"])
@pytest.mark.parametrize("make", [Frozen, lambda: FrozenChain(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten())],
                         ids=["module", "chain"])
def test_rounds_leave_frozen_statistics(make: Any, parts: list[Any]) -> None:
    module = seeded(make)
    if isinstance(module, FrozenChain):
        module.add_module("head", nn.Linear(256, 3))
    fed = federation(module, *parts)
    for _ in range(2):
        fed.round()
    for key, value in module.named_buffers():
        assert torch.equal(fed.model["buffers"][key], value), key
    assert not torch.equal(fed.model["params"]["head.weight"], module.get_submodule("head").weight)


def test_steps_that_are_replayed_leave_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one = federation(seeded(Frozen))
    monkeypatch.setattr("core_parts.Sequential", ReplayedSequential)
    other = federation(seeded(Frozen))
    for fed in (one, other):
        fed.round()
        fed.round()
    assert not differences(one, other)


# ---- chains ----------------------------------------------------------------------------------------------------------

def test_a_staged_chain_keeps_its_class_names_and_listeners() -> None:
    chain, heard = FrozenChain(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3)), []
    chain.register_forward_hook(lambda *_: heard.append("after"))
    hook = chain.register_forward_pre_hook(lambda *_: heard.append("before"))
    x, names = torch.randn(4, 1, 8, 8), [n for n, _ in chain.named_parameters()]
    theirs = chain.eval()(x)
    whole = staged(chain)
    assert isinstance(whole, FrozenChain)
    assert [n for n, _ in whole.named_parameters()] == names
    whole.add_module("attached", nn.Linear(100, 100))            # does not join
    heard.clear()
    assert torch.equal(whole(input=x), theirs)
    assert heard == ["before", "after"]
    hook.remove()
    whole(x)
    assert heard == ["before", "after", "after"]
    assert torch.equal(copy.deepcopy(whole)(x), theirs)


def test_a_sequential_with_a_forward_of_its_own_runs_it() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)
    module = seeded(lambda: Twice(nn.Flatten()))
    module.add_module("head", seeded(lambda: nn.Linear(64, 3)))
    fed, x = federation(module), tiny_population().x[:4].float()
    logits = fed.look(0, fed.client(0), fed.model, x, False, True).logits
    assert torch.equal(logits, module(x))
    assert torch.equal(logits, 2 * module.head(x.flatten(1)))


def test_a_copy_of_one_stage_holds_that_stage() -> None:
    whole = staged(nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Sequential(nn.Conv2d(2, 512, 3), nn.Flatten())))
    Network(whole)
    one = copy.deepcopy(whole[0])
    assert type(one) is Chain
    assert set(one.__dict__) == set(nn.Sequential().__dict__)


# ---- dropout ---------------------------------------------------------------------------------------------------------

def test_who_listens_to_a_dropout_layer_goes_on_listening() -> None:
    chain, heard = nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), []
    hook = chain[1].register_forward_hook(lambda layer, args, out: heard.append(type(layer)))
    network = Network(chain)
    run = lambda: network.forward({"params": {}, "buffers": {}}, torch.ones(2, 1, 8, 8), train=True, key=lambda: rng.key(1))
    run()
    assert heard == [KeyedDropout]
    hook.remove()
    run()
    assert heard == [KeyedDropout]


def test_a_dropout_layer_with_a_forward_of_its_own_keeps_it() -> None:
    chain = nn.Sequential(nn.Flatten(), nn.Dropout(0.5))
    chain[1].forward = lambda x: x + 1
    out = Network(chain).forward({"params": {}, "buffers": {}}, torch.ones(2, 1, 8, 8), train=True, key=lambda: rng.key(1)).logits
    assert torch.equal(out, torch.full((2, 64), 2.0))


# ---- maps that are computed again ------------------------------------------------------------------------------------

class Checkpointed(nn.Module):
    """Its body runs again on the way back, so that maps need not be kept."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head, self.again = nn.Linear(256, 3), again

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_that_run_again_do_so_with_the_model_in_training(precision: str) -> None:
    """A teacher's pass stands between a step's pass and its way back (FedNTD's is the received model). Bit for bit the same with and
    without computing maps again; it used the teacher's weights."""
    runs = []
    for again in (False, True):
        fed = federation(seeded(lambda again=again: Checkpointed(again)), Ntd(), precision=precision)
        fed.round()
        runs.append(fed)
    assert not differences(*runs)
