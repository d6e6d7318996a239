"""APFL by hand on two logits; statistics, frozen parameters, and who is served by what."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from quadratic import Vector, W

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.errors import RefusedCombination
from consilience.parts import PARTS
from consilience.parts.apfl import Apfl
from consilience.parts.mr import Mr
from consilience.parts.scaffold import Scaffold
from consilience.testing import LAYOUT, TinyNet, differences, in_model, run_tiny, tiny_federation, tiny_population


def voters(part: Apfl, *labels: list[int], **policy: Any) -> Federation:
    """Logits are the weights, (0, 0) at first, and a batch is one label: every model is u·(1, −1), its gradient −σ(−2u)·(1, −1) for
    label 0 and σ(2u)·(1, −1) for label 1.
    """
    y = torch.tensor([c for own in labels for c in own])
    people = Population(torch.ones(len(y), 1), y, tuple(torch.arange(len(y)).split([len(own) for own in labels])), 2, as_float)
    settings = {"lr": 0.1, "batch": 1, "weights": "uniform"} | policy
    return Federation(Vector((0.0, 0.0)), Layout(), Method([part]), people, Policy(**settings), Sequential)


def state(fed: Federation, number: int = 0) -> tuple[float, float, float]:
    """v, α, and what serves the client."""
    kept = fed.client(number).tensors["kept"]["apfl"]
    return kept["own"]["params"][W][0].item(), kept["alpha"].item(), fed.personal_model(number)[0]["params"][W][0].item()


def sigma(u: float) -> float:
    return 1 / (1 + exp(-u))


def test_two_steps_by_hand() -> None:
    """η = 0.1, α = ½, label 0. Step one, all at 0: the gradient is −½, so w = 0.05 and v = 0.1·½·½ = 0.025; v − w was 0, so α stays.
    Step two at v̄ = ½·0.025 + ½·0.05 = 0.0375: the gradient is −σ(−0.075) = −0.4812588, v = 0.025 + 0.1·½·0.4812588 = 0.04906294 and
    α = ½ − 0.1·2·(0.025 − 0.05)·(−0.4812588) = 0.49759371 (two entries, so twice). w = 0.05 + 0.1·σ(−0.1) = 0.09750208.
    """
    fed = voters(Apfl(), [0, 0])
    fed.round()
    v, alpha, served = state(fed)
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([0.09750208, -0.09750208], abs=1e-7)
    assert (v, alpha) == pytest.approx((0.04906294, 0.49759371), abs=1e-7)
    assert served == pytest.approx(0.49759371 * 0.04906294 + 0.50240629 * 0.09750208, abs=1e-7)


@pytest.mark.parametrize("adapt", ["step", "round", "never"])
def test_rounds_of_two_opposed_clients_by_hand(adapt: str) -> None:
    """The other client pulls w back to 0 after every round, so that v is ahead of w and α grows; in a round's first step only, or never."""
    fed = voters(Apfl(alpha=0.3, adapt=adapt), [0, 0, 0], [1, 1, 1], lr=0.5)
    v, alpha, w = 0.0, 0.3, 0.0
    for _ in range(3):
        w = 0.0
        for step in range(3):
            g = -sigma(-2 * (alpha * v + (1 - alpha) * w))
            slope = 2 * (v - w) * g
            v, w = v - 0.5 * alpha * g, w + 0.5 * sigma(-2 * w)
            if adapt == "step" or (adapt == "round" and step == 0):
                alpha = min(max(alpha - 0.5 * slope, 0.0), 1.0)
        fed.round()
        assert state(fed) == pytest.approx((v, alpha, alpha * v + (1 - alpha) * w), abs=1e-6)
        assert state(fed, 1) == pytest.approx((-v, alpha, -(alpha * v + (1 - alpha) * w)), abs=1e-6)
    assert alpha == 0.3 if adapt == "never" else abs(alpha - 0.3) > 1e-3


def test_alpha_stays_between_0_and_1_by_hand() -> None:
    """Two opposed clients, η = 2, α = 0.98. Round one: v = 2·0.98·½ = 0.98, w = 0. Round two: v̄ = 0.9604, the gradient −σ(−1.9208) =
    −0.127772, the slope 2·0.98·(−0.127772) = −0.2504, and α = 0.98 + 0.501 is cut to 1; v = 0.98 + 2·0.98·0.127772 = 1.230434.
    One client, η = 2, α = 0.01: step one w = 1, v = 0.01. Step two: the slope is −2·0.99·(−σ(−1.9802)) = 0.2402, and α is cut to 0;
    from then on v stands still, and the client is served by w.
    """
    fed = voters(Apfl(alpha=0.98), [0], [1], lr=2.0)
    fed.round(), fed.round()
    assert state(fed) == pytest.approx((1.230434, 1.0, 1.230434), abs=1e-5)
    fed = voters(Apfl(alpha=0.01), [0, 0, 0], lr=2.0)
    fed.round()
    v, alpha, served = state(fed)
    assert alpha == 0.0
    assert v == pytest.approx(0.01 + 2 * 0.01 * sigma(-2 * (0.01 * 0.01 + 0.99)), abs=1e-6)          # its second step was its last
    assert served == pytest.approx(fed.model["params"][W][0].item(), abs=1e-7)
    fed.round()
    assert state(fed)[0] == pytest.approx(v, abs=1e-7)


def test_alpha_1_is_a_model_of_ones_own_and_alpha_0_the_trained_one() -> None:
    how: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "sizes": (24,)}
    alone, fed = run_tiny([PARTS["local"]()], **how), run_tiny([Apfl(alpha=1.0, adapt="never")], **how)
    for k, p in fed.personal_model(0)[0]["params"].items():
        torch.testing.assert_close(p, alone.personal_model(0)[0]["params"][k], atol=1e-6, rtol=1e-5)
    fed = run_tiny([Apfl(alpha=0.0, adapt="never")], **how)
    for k, p in fed.personal_model(0)[0]["params"].items():
        torch.testing.assert_close(p, fed.model["params"][k], atol=1e-6, rtol=0)      # of the only client, so the average is its own


def test_global_model_is_fedavgs_bit_for_bit() -> None:
    assert not differences(run_tiny(), run_tiny([Apfl(alpha=0.7)]), only=in_model)
    partners = [Scaffold(), Mr()]                                                     # corrections and MR stay with w (METHODS 10.2)
    assert not differences(run_tiny(partners), run_tiny([*partners, Apfl()]), only=in_model)


def test_the_mixture_has_statistics_of_its_own() -> None:
    """Client 0 makes 3 batches × 2 epochs; both branches see them, w's statistics are not v̄'s."""
    fed = run_tiny([Apfl()], rounds=1, order=[0])
    own = fed.client(0).tensors["kept"]["apfl"]["own"]["buffers"]
    assert own["stage1.1.num_batches_tracked"].item() == fed.model["buffers"]["stage1.1.num_batches_tracked"].item() == 6
    assert not torch.equal(own["stage1.1.running_mean"], fed.model["buffers"]["stage1.1.running_mean"])
    model, taps = fed.personal_model(0)
    assert torch.equal(model["buffers"]["stage1.1.running_mean"], own["stage1.1.running_mean"])
    assert not taps


def test_what_the_user_froze_stays_frozen() -> None:
    net = TinyNet()
    net.header.requires_grad_(False)
    fed = Federation(net, LAYOUT, Method([Apfl()]), tiny_population(), Policy(batch=8, lr=0.05), Sequential)
    fed.round()
    own = fed.client(0).tensors["kept"]["apfl"]["own"]["params"]
    assert torch.equal(own["header.weight"], net.header.weight)
    assert not torch.equal(own["head.weight"], net.head.weight)


def test_absent_and_late_clients() -> None:
    """A client that was away keeps v, α and its mixture; one that comes late begins with the initial model as v, not with the day's."""
    fed = tiny_federation([Apfl()], steps=1, momentum=0.0, weight_decay=0.0)
    start = fed.model["params"]["head.weight"].clone()
    fed.round([0, 1])
    away = fed.client(1).tensors["kept"]["apfl"]
    for _ in range(4):
        fed.round([0])
    assert fed.client(1).tensors["kept"]["apfl"] is away
    near = lambda t: float((t - start).norm())
    gone = near(fed.model["params"]["head.weight"])
    fed.round([3])
    late = fed.client(3).tensors["kept"]["apfl"]
    assert 0 < near(late["own"]["params"]["head.weight"]) < gone / 2                  # one step of size ηα from the initial model
    assert late["alpha"] != 0.5                                                       # v and w were apart from the first step


@pytest.mark.parametrize(("other", "reason"), [
    ("per", "per has local head"), ("rep", "rep has local head"), ("local", "local has local head"), ("fomo", "fomo has local head"),
    ("ditto", "both define `personalise`"), ("babu", "both define `personalise`"), ("union", "apfl has personal models")])
def test_refusals(other: str, reason: str) -> None:
    with pytest.raises(RefusedCombination, match=reason):
        Method([Apfl(), PARTS[other](**PARTS[other].trial)])
