"""FedRoD: both heads by hand, against plain modules, and what a client is served by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, check_step, features, next_batch, plain_net
from quadratic import Vector, W
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts import PARTS
from consilience.parts.mr import Mr
from consilience.parts.prbm import Prbm
from consilience.parts.rod import Rod
from consilience.testing import LAYOUT, TinyNet, differences, run_tiny, tiny_federation, tiny_population


def voters(part: Rod, *labels: list[int], model: nn.Module | None = None, **policy: Any) -> Federation:
    """Logits are the weights of the head, whatever the input; clients have labels alone, and a step sees all of them."""
    y = torch.tensor([c for own in labels for c in own])
    rows = tuple(torch.arange(len(y)).split([len(own) for own in labels]))
    people = Population(torch.ones(len(y), 1), y, rows, 3, as_float)
    settings = {"lr": 0.1, "batch": len(labels[0]), "weights": "uniform"} | policy
    return Federation(model or Vector((0.0, 0.0, 0.0)), Layout(), Method([part]), people, Policy(**settings), Sequential)


def generic(fed: Federation) -> list[float]:
    return fed.model["params"][W].flatten().tolist()


def own_head(fed: Federation, number: int) -> Any:
    return fed.client(number).tensors["personal"]["rod"]["head"]


@pytest.mark.parametrize(("gamma", "moved"), [
    (1.0, (0.0, 0.0, 0.0)),               # softmax of log (3, 1, 0) = (3, 1, 0)/4, which is what the labels are: no gradient
    (2.0, (-0.015, 0.015, 0.0)),          # (9, 1, 0)/10 − (3, 1, 0)/4 = (0.15, −0.15, 0)
    (0.0, (5 / 120, -1 / 120, -4 / 120))  # (1, 1, 1)/3 − (3, 1, 0)/4 = (−5, 1, 4)/12: 0⁰ is 1, the absent class counts
])
def test_both_heads_by_hand(gamma: float, moved: tuple[float, ...]) -> None:
    """Labels 0 0 0 1, all logits 0, η = 0.1. The generic gradient is softmax(γ·log n) − (3, 1, 0)/4; the personal head sees g = p = 0
    and has (−5, 1, 4)/12 at any γ.
    """
    fed = voters(Rod(gamma=gamma), [0, 0, 0, 1])
    fed.round()
    assert generic(fed) == pytest.approx(moved, abs=1e-7)
    assert own_head(fed, 0)[W].flatten().tolist() == pytest.approx([5 / 120, -1 / 120, -4 / 120], abs=1e-7)


def test_second_step_of_the_personal_head_sees_the_sum_by_hand() -> None:
    """At γ = 0 both heads have moved alike in step one, m = (5, −1, −4)/120, so that the personal head's gradient is softmax(2m) − t."""
    fed = voters(Rod(gamma=0.0), [0, 0, 0, 1], epochs=2)
    fed.round()
    m, t = torch.tensor([5.0, -1, -4]) / 120, torch.tensor([3.0, 1, 0]) / 4
    assert own_head(fed, 0)[W].flatten().tolist() == pytest.approx((m - 0.1 * ((2 * m).softmax(0) - t)).tolist(), abs=1e-7)
    assert generic(fed) == pytest.approx((m - 0.1 * (m.softmax(0) - t)).tolist(), abs=1e-7)


def test_a_client_of_one_sample_by_hand() -> None:
    """One class is all there is: nothing to learn for the generic head; the personal one moves by −0.1·((1, 1, 1)/3 − (0, 1, 0))."""
    fed = voters(Rod(), [1])
    report = fed.round()
    assert generic(fed) == [0.0, 0.0, 0.0]
    assert own_head(fed, 0)[W].flatten().tolist() == pytest.approx([-1 / 30, 2 / 30, -1 / 30], abs=1e-7)
    assert report.losses[0] == pytest.approx(torch.tensor(3.0).log().item(), abs=1e-6)          # 0 and log 3


def test_absent_classes_stay_where_they_are() -> None:
    """Their rows of the generic head have no gradient, those of FedAvg's have; the personal head learns that they are absent."""
    population = tiny_population((24,))
    population.y.clamp_(max=1)                                                   # class 2 is nobody's
    how: dict[str, Any] = {"population": population, "momentum": 0.0, "weight_decay": 0.0}
    start, fed, plain = tiny_federation(), run_tiny([Rod()], **how), run_tiny(**how)
    row = lambda f: f.model["params"]["head.weight"][2]
    assert torch.equal(row(fed), row(start))
    assert not torch.equal(row(plain), row(start))
    assert own_head(fed, 0)["head.bias"][2] < start.model["params"]["head.bias"][2]


def test_step_against_plain_modules() -> None:
    """In round two the personal head is no longer the generic one. Its loss moves nothing but itself."""
    fed = tiny_federation([Rod(gamma=1.5)], **ONE)
    fed.round([0])
    net, head = plain_net(fed.model), nn.Linear(12, 3)
    head.load_state_dict({k.removeprefix("head."): v for k, v in own_head(fed, 0).items()})
    x, y = next_batch(fed, 0)
    z = features(net, x).detach()
    F.cross_entropy(net.head(z).detach() + head(z), y).backward()
    expected = {f"head.{k}": (p - 0.05 * p.grad).detach() for k, p in head.named_parameters() if p.grad is not None}
    counts = torch.bincount(fed.samples.y[fed.samples.rows[0].train], minlength=3)

    def term(net: TinyNet, x: Tensor, y: Tensor) -> Tensor:
        z = features(net, x).detach()
        return F.cross_entropy(net.head(z).detach() + head(z), y).detach()
    assert check_step(fed, 0, term, lambda net, x, y: F.cross_entropy(net(x) + 1.5 * counts.log(), y)) > 0.1
    for k, p in expected.items():
        torch.testing.assert_close(own_head(fed, 0)[k], p, atol=2e-6, rtol=1e-5)


def served_logits(fed: Federation, number: int, x: Tensor) -> Tensor:
    model, taps = fed.personal_model(number)
    return fed.look(number, fed.client(number), model, x, False, taps).logits


def test_clients_are_served_by_the_sum_and_the_server_by_the_generic_head() -> None:
    fed = run_tiny([Rod()])
    x = fed.samples.x[:7]
    net = plain_net(fed.model, train=False)
    z = features(net, x)
    torch.testing.assert_close(fed.look(0, fed.client(0), fed.model, x, False, False).logits, net(x))
    for number in (0, 1):
        p = own_head(fed, number)
        torch.testing.assert_close(served_logits(fed, number, x), net(x) + F.linear(z, p["head.weight"], p["head.bias"]))
    assert fed.no_global_model is None
    assert fed.personal


def test_the_personal_head_sees_what_the_generic_one_sees() -> None:
    """With DBE's shift that is the shifted representation."""
    fed = run_tiny([Rod(), Prbm()])
    x, shift = fed.samples.x[:7], fed.client(0).tensors["personal"]["prbm"]["shift"]
    assert shift.abs().max() > 1e-3
    net, p = plain_net(fed.model, train=False), own_head(fed, 0)
    z = features(net, x) + shift
    torch.testing.assert_close(served_logits(fed, 0, x), net.head(z) + F.linear(z, p["head.weight"], p["head.bias"]))


class Deep(TinyNet):
    """A head of two layers: logits of two such heads are not those of one with added weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))       # type: ignore[assignment]


def test_heads_of_several_layers() -> None:
    """As HAR-CNN's. Dropout is off in what a client is served by."""
    fed = Federation(Deep(), LAYOUT, Method([Rod()]), tiny_population(), Policy(batch=8, lr=0.05), Sequential)
    fed.round()
    net, x = Deep().eval(), fed.samples.x[:7]
    net.load_state_dict({k: v for half in fed.model.values() for k, v in half.items()})
    own = copy.deepcopy(net.head)
    own.load_state_dict({k.removeprefix("head."): v for k, v in own_head(fed, 0).items()})
    z = features(net, x)
    assert not torch.equal(own[0].weight, net.head[0].weight)
    torch.testing.assert_close(served_logits(fed, 0, x), net.head(z) + own(z))


def test_plain_training_is_the_task_alone() -> None:
    """DBE's first epoch runs without FedRoD's loss: the mean agreed on is FedAvg's."""
    both, alone = tiny_federation([Rod(), Mr()]), tiny_federation([Mr()])
    both.prepare(), alone.prepare()
    assert torch.equal(both.shared["mr"]["mean"], alone.shared["mr"]["mean"])
    assert alone.shared["mr"]["mean"].abs().max() > 0


def test_global_model_is_fedavgs_bit_for_bit_without_balance() -> None:
    fed, plain = run_tiny([Rod(gamma=0.0)]), run_tiny()
    assert not differences(plain, fed, only=lambda k: k.startswith("model/"))
    assert differences(plain, run_tiny([Rod()]), only=lambda k: k.startswith("model/"))


def test_absent_and_late_clients() -> None:
    """A client that was away keeps its head; one that comes late begins with the initial head, not with the generic one of the day."""
    fed = tiny_federation([Rod()], **ONE)
    start = fed.model["params"]["head.weight"].clone()
    fed.round([0, 1])
    away = own_head(fed, 1)["head.weight"].clone()
    fed.round([0])
    assert torch.equal(own_head(fed, 1)["head.weight"], away)
    assert torch.equal(own_head(fed, 3)["head.weight"], start)
    net, (x, y) = plain_net(fed.model), next_batch(fed, 3)
    z = features(net, x).detach()
    head = {k: v.clone().requires_grad_() for k, v in own_head(fed, 3).items()}
    loss = F.cross_entropy(net.head(z).detach() + F.linear(z, head["head.weight"], head["head.bias"]), y)
    (g,) = torch.autograd.grad(loss, [head["head.weight"]])
    fed.round([3])
    torch.testing.assert_close(own_head(fed, 3)["head.weight"], start - 0.05 * g, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("other", "reason"), [
    ("mixup", "mixup has soft labels"), ("cosine", "rod has a second head"), ("per", "per has local head"), ("rep", "rep has local head"),
    ("local", "local has local head"), ("fomo", "fomo has local head"), ("babu", "babu has a frozen random head"),
    ("drift", "both define `main_loss`"), ("union", "rod has personal models")])
def test_refusals(other: str, reason: str) -> None:
    with pytest.raises(RefusedCombination, match=reason):
        Method([Rod(), PARTS[other](**PARTS[other].trial)])


def test_a_head_with_statistics_is_refused() -> None:
    class Normed(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))            # type: ignore[assignment]
    with pytest.raises(ConfigError, match="rod copies the head"):
        Federation(Normed(), LAYOUT, Method([Rod()]), tiny_population(), Policy(batch=8), Sequential)
