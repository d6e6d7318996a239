"""MixStyle: statistics mixed by hand, its draws, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tap_view import view_of
from torch import nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError
from consilience.parts.mixstyle import MixStyle
from consilience.testing import differences, run_tiny, tiny_federation, tiny_population

SPEC = tiny_federation().spec                                  # one stage, batch 8
MAPS = torch.tensor([[1.0, 3], [6, 14]]).reshape(2, 1, 1, 2)


def drawn(*weight: float, on: bool = True, order: tuple[int, ...] = (1, 0)) -> Any:
    return {"on": torch.tensor([on]), "weight": torch.tensor([weight]), "order": torch.tensor([order])}


def test_by_hand() -> None:
    """Maps (1, 3) and (6, 14) have means 2 and 10 and deviations √2 and 4√2. λ = ¼ for the first: deviation √2/4 + 3√2 = 3.25√2 and mean
    ½ + 7.5 = 8; it was ∓1/√2 when normalised, so 8 ∓ 3.25. λ = 1 for the second, which stays.
    """
    x = MAPS.clone().requires_grad_()
    out = MixStyle().tap(view_of(drawn(0.25, 1.0)), "q", x)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.75, 11.25, 6, 14]), rtol=1e-5, atol=1e-5)
    # The statistics are constants: x̂ = 3.25 x + 1.5 has the slope 3.25, at its own place alone.
    (slope,) = torch.autograd.grad(out[0, 0, 0, 0], x)
    torch.testing.assert_close(slope.flatten(), torch.tensor([3.25, 0, 0, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["coin", "evaluation", "no plan", "another point", "one sample"])
def test_what_is_left_alone(case: str) -> None:
    plan = {} if case == "no plan" else drawn(0.25, 1.0, on=case != "coin")
    x = MAPS[:1] if case == "one sample" else MAPS
    view = view_of(plan, train=case != "evaluation")
    assert torch.equal(MixStyle().tap(view, "elsewhere" if case == "another point" else "q", x), x)


def test_dead_channels_stay_finite() -> None:
    x = torch.zeros(2, 1, 2, 2)
    x[1] += torch.arange(4.0).reshape(2, 2)
    out = MixStyle().tap(view_of(drawn(0.5, 0.5)), "q", x.requires_grad_())
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert slope.isfinite().all()
    torch.testing.assert_close(out[0].flatten(), torch.full((4,), 0.75), rtol=0, atol=1e-6)        # its own mean is 0, the partner's 1.5


def test_draws() -> None:
    """Beta(α, α): mean ½, variance 1/(4(2α + 1)), for every sample and stage; the coin falls on 0.3 of the stages; partners are within
    the batch, and differ from stage to stage.
    """
    sizes = torch.tensor([8, 8, 3] * 400)
    spec = two_stages().spec
    plan = MixStyle(p=0.3, alpha=0.5).plan(rng.key(4), spec, sizes)
    assert plan["weight"].shape == (1200, 2, 8)
    assert plan["weight"].mean().item() == pytest.approx(0.5, abs=0.01)
    assert plan["weight"].var().item() == pytest.approx(1 / 8, abs=0.005)
    assert len(set(plan["weight"][0].flatten().tolist())) == 16
    assert plan["on"].float().mean(0).tolist() == pytest.approx([0.3, 0.3], abs=0.05)
    assert not torch.equal(plan["on"][:, 0], plan["on"][:, 1])
    for row, n in zip(plan["order"], sizes.tolist()):
        for order in row:
            assert sorted(order[:n].tolist()) == list(range(n))
    assert not torch.equal(plan["order"][:, 0], plan["order"][:, 1])


class Deep(nn.Sequential):
    """Three stages; after the last a single position is left."""

    def __init__(self) -> None:
        conv = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        super().__init__()
        self.a, self.b, self.c = conv(1, 3), conv(3, 4), nn.Sequential(conv(4, 5), nn.AdaptiveAvgPool2d(1))
        self.flat, self.head = nn.Flatten(), nn.Linear(5, 3)


def two_stages(**settings: Any) -> Federation:
    layout = Layout(head="head", stages=("a", "b", "c"))
    return Federation(Deep(), layout, Method([MixStyle(p=1.0, **settings)]), tiny_population(), Policy(batch=8, epochs=1), Sequential)


def test_the_first_two_stages_or_those_named() -> None:
    part, layout = MixStyle(), Layout(stages=("a", "b", "c"))
    assert part.points(layout) == ("a", "b")
    assert MixStyle(stages=(3, 1, 1)).points(layout) == ("c", "a")
    assert part.points(Layout(stages=("a",))) == ("a",)
    fed = two_stages()
    fed.round()
    assert set(fed.program.network.points) == {"a", "b", "head:input"}


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"'stages' option of mixstyle asks for \[4\], but the model has stages 1 to 3"):
        two_stages(stages=(4,))
    with pytest.raises(ConfigError, match=r"needs feature maps of at least two positions, but 'c' has shape \(5, 1, 1\)"):
        two_stages(stages=(3,))
    with pytest.raises(ConfigError, match="asks for the first two, but the model has no convolution stages"):
        MixStyle().points(Layout())


def test_alpha_0_mixes_nothing() -> None:
    assert MixStyle(alpha=0.0).plan(rng.key(0), SPEC, torch.tensor([8]))["weight"].tolist() == [[[1.0] * 8]]


def test_a_client_that_comes_late_draws_the_same() -> None:
    """Draws belong to client and round: who else took part before changes none of them."""
    def third_round(cohorts: list[list[int]]) -> Any:
        fed = tiny_federation([MixStyle(p=1.0)])
        for cohort in cohorts:
            fed.round(cohort)
        return fed.plans(3, fed.samples.schedule(3, fed.phases), "round")["mixstyle"]
    one, other = third_round([[0], [1]]), third_round([[0, 1, 3], [3]])
    assert all(torch.equal(one[kind], other[kind]) for kind in one)


def test_it_changes_training() -> None:
    assert differences(run_tiny([MixStyle(p=1.0)]), run_tiny())
