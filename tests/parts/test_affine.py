"""FedRobust on a model of two numbers, where ascent and descent can be done by hand."""

from __future__ import annotations

from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.parts.affine import Affine
from consilience.parts.dann import Dann
from consilience.parts.prbm import Prbm
from consilience.parts.sam import Sam
from consilience.testing import differences, run_tiny, tiny_federation

W = "head.weight"


class Slope(nn.Module):
    """Logits (w₀u, w₁u) of one number u."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight.data.copy_(torch.tensor([[first], [second]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def slope(part: Part, steps: int, **policy: Any) -> Federation:
    """One client with samples x = 1 of class 1, taken one at a time with η = 0.4; the model starts at (0, ln 3)."""
    people = Population(torch.ones(steps, 1), torch.ones(steps, dtype=torch.int64), (torch.arange(steps),), 2, as_float)
    return Federation(Slope(0.0, log(3)), Layout(), Method([part]), people, Policy(lr=0.4, batch=1, **policy), Sequential)


def own(fed: Federation, number: int = 0) -> dict[str, Tensor]:
    return fed.client(number).tensors["personal"]["affine"]


def by_hand(steps: int, weight: float, ascent: float) -> tuple[float, float, float]:
    """With s = (w₁ − w₀)u and u = Λx + δ, x = 1, the loss of class 1 is ln(1 + e⁻ˢ), and dloss/ds = −1/(1 + eˢ) =: −q."""
    slope, matrix, offset = log(3), 1.0, 0.0
    for _ in range(steps):
        q = 1 / (1 + exp(slope * (matrix + offset)))
        matrix, offset = (matrix + 0.4 * ascent * (-q * slope - 2 * weight * (matrix - 1)),
                          offset + 0.4 * ascent * (-q * slope - 2 * weight * offset))
        u = matrix + offset
        q = 1 / (1 + exp(slope * u))
        slope += 2 * 0.4 * q * u                  # w₁ gains η·q·u, w₀ loses it
    return slope, matrix, offset


def test_one_step_by_hand() -> None:
    """s = ln 3, so q = 1/4: Λ = 1 − 0.4·ln 3/4 = 0.8901388, δ = −0.1098612 (nothing is paid at the start). Then u = 0.7802775,
    s = 0.8572225, q = 0.2979200, and w₁ = ln 3 + 0.4·q·u = 1.1915964, w₀ = −0.0929841. Without the ascent w₁ would be ln 3 + 0.1.
    """
    fed = slope(Affine(), 1)
    fed.round()
    assert own(fed)["matrix"].item() == pytest.approx(0.8901388, abs=1e-6)
    assert own(fed)["offset"].item() == pytest.approx(-0.1098612, abs=1e-6)
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([-0.0929841, 1.1915964], abs=1e-6)


@pytest.mark.parametrize(("weight", "ascent"), [(1.0, 1.0), (0.25, 2.0), (0.0, 0.5)])
def test_later_steps_pay_for_the_distance(weight: float, ascent: float) -> None:
    fed = slope(Affine(weight=weight, ascent=ascent), 3)
    fed.round()
    want, matrix, offset = by_hand(3, weight, ascent)
    w = fed.model["params"][W].flatten().tolist()
    assert [w[1] - w[0], own(fed)["matrix"].item(), own(fed)["offset"].item()] == pytest.approx([want, matrix, offset], abs=1e-6)


def test_the_change_goes_on_in_the_next_round() -> None:
    """Two rounds of one step are one round of two: Λ and δ stay with the client."""
    two, one = slope(Affine(), 1), slope(Affine(), 2)
    two.round()
    two.round()
    one.round()
    torch.testing.assert_close(own(two), own(one))
    torch.testing.assert_close(two.model, one.model)


def test_channels_are_mixed_at_every_position() -> None:
    """Λ = (1 2; 3 4) and δ = (10, 20) take (5, 7) to (5 + 14 + 10, 15 + 28 + 20), and (1, 0) to (11, 23)."""
    view = SimpleNamespace(train=True, spec=SimpleNamespace(layout=Layout()),
                           personal={"matrix": torch.tensor([[1.0, 2], [3, 4]]), "offset": torch.tensor([10.0, 20])})
    maps = torch.tensor([[5.0, 1], [7, 0]]).reshape(1, 2, 1, 2)
    for layout in (torch.contiguous_format, torch.channels_last):
        changed = Affine().tap(view, ":input", maps.contiguous(memory_format=layout))         # type: ignore[arg-type]
        assert changed.flatten().tolist() == [29, 11, 63, 23]
    assert Affine().tap(view, ":input", torch.tensor([[5.0, 7]])).tolist() == [[29, 63]]      # type: ignore[arg-type]


def test_a_step_on_three_channels_against_plain_tensors() -> None:
    """Every entry of Λ ascends, also those that mix: a linear model on images of 3×2×2, two samples, one step."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 2, 2, generator=generator), torch.tensor([0, 1])
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    weight, bias = (p.detach().clone().requires_grad_() for p in module[1].parameters())
    fed = Federation(module, Layout(head="1"), Method([Affine()]), Population(x, y, (torch.arange(2),), 2, as_float),
                     Policy(lr=0.4, batch=2), Sequential)
    matrix, offset = torch.eye(3).requires_grad_(), torch.zeros(3, requires_grad=True)

    def loss() -> Tensor:
        changed = torch.stack([sum(matrix[d, c] * x[:, c] for c in range(3)) + offset[d] for d in range(3)], 1)
        return nn.functional.cross_entropy(changed.flatten(1) @ weight.T + bias, y)
    up = torch.autograd.grad(loss(), [matrix, offset])
    with torch.no_grad():
        matrix += 0.4 * up[0]
        offset += 0.4 * up[1]
    down = torch.autograd.grad(loss(), [weight, bias])
    fed.round()
    torch.testing.assert_close(own(fed)["matrix"], matrix.detach())
    torch.testing.assert_close(own(fed)["offset"], offset.detach())
    assert own(fed)["matrix"][0, 1].abs() > 1e-4
    torch.testing.assert_close(fed.model["params"]["1.weight"], (weight - 0.4 * down[0]).detach())
    torch.testing.assert_close(fed.model["params"]["1.bias"], (bias - 0.4 * down[1]).detach())


def test_nobody_is_served_by_a_changed_model() -> None:
    fed = run_tiny([Affine()])
    assert not torch.equal(own(fed)["matrix"], torch.eye(1))
    assert not fed.personal
    x = fed.samples.x[:6]
    served, taps = fed.personal_model(0)
    looks = [fed.look(0, fed.client(0), served, x, False, t).logits for t in (taps, False)]
    assert torch.equal(*looks)
    assert tiny_federation([Affine(), Prbm()]).personal


def test_a_client_that_has_not_come_keeps_the_identity() -> None:
    fed = tiny_federation([Affine()])
    fed.round([0, 3])
    assert torch.equal(own(fed, 1)["matrix"], torch.eye(1))
    assert torch.equal(own(fed, 1)["offset"], torch.zeros(1))
    fed.round([1])
    assert not torch.equal(own(fed, 1)["matrix"], torch.eye(1))


def test_with_sam_the_ascent_is_taken_once() -> None:
    """Λ after one step is the same whatever point the second pass is at: it saw the first alone."""
    sam, alone = (run_tiny([Affine(), *more], rounds=1, steps=1) for more in ([Sam(rho=1.0)], []))
    assert not differences(sam, alone, only=lambda k: "/affine/" in k)
    assert differences(sam, alone, only=lambda k: k.startswith("model/params"))


def test_what_others_look_at_comes_from_the_changed_batch() -> None:
    """DANN's discriminator learns from the features of the main pass."""
    dann, both = (run_tiny(parts, rounds=1, steps=1) for parts in ([Dann()], [Affine(ascent=5.0), Dann()]))
    assert differences(dann, both, only=lambda k: k.startswith("model/params/dann."))


def test_words_are_refused() -> None:
    words: Any = SimpleNamespace(tokens=True)
    assert "words of a text" in (Affine().require(words) or "")
    assert Affine(ascent=0.0).require(words) is None
