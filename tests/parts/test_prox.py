"""FedProx: the pull, by hand on a parabola."""

from __future__ import annotations

import pytest
from one_step import ONE, check_step
from quadratic import scalars, weight

from consilience.core import correction
from consilience.core.part import Part
from consilience.errors import RefusedCombination
from consilience.parts.cm import Cm
from consilience.parts.dyn import Dyn
from consilience.parts.local import Local
from consilience.parts.per import Per
from consilience.parts.prox import Prox
from consilience.parts.sam import Sam
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, largest_difference, run_tiny, tiny_federation


def test_pull_by_hand():
    # a = 1, w⁰ = 0, η = 0.1, μ = 2.
    # step 1: g = (0 − 1) + 2·0 = −1            → w = 0.1
    # step 2: g = (0.1 − 1) + 2·0.1 = −0.7      → w = 0.17
    # step 3: g = (0.17 − 1) + 2·0.17 = −0.49   → w = 0.219
    fed = scalars([Prox(mu=2.0)], [1.0], [3])
    fed.round()
    assert weight(fed) == pytest.approx(0.219, abs=1e-6)


def test_the_pull_starts_anew_from_each_received_model():
    # second round from w = 0.219: the pull is towards 0.219, no longer towards 0
    # step 1: g = −0.781 → 0.2971; step 2: g = −0.7029 + 2·0.0781 = −0.5467 → 0.35177; step 3: −0.64823 + 0.26554 = −0.38269
    fed = scalars([Prox(mu=2.0)], [1.0], [3])
    fed.round()
    fed.round()
    assert weight(fed) == pytest.approx(0.35177 + 0.038269, abs=1e-5)


def test_the_loss_reported_holds_the_squared_norm():
    # losses: ½·1 + 0; ½·0.9² + (2/2)·0.1² = 0.415; ½·0.83² + 0.17² = 0.37335. An unsquared norm would give 0.505 in step 2.
    fed = scalars([Prox(mu=2.0)], [1.0], [3])
    assert fed.round().losses[0] == pytest.approx((0.5 + 0.415 + 0.37335) / 3, abs=1e-6)


def test_what_does_not_travel_is_not_pulled():
    with pytest.raises(RefusedCombination, match="local has no global model, and prox pulls towards it"):
        tiny_federation([Local(), Prox(mu=50.0)])
    free, pulled = run_tiny([Per()], rounds=1), run_tiny([Per(), Prox(mu=5.0)], rounds=1)
    first = tiny_federation().model["params"]["neck.1.weight"]
    moved = [(f.model["params"]["neck.1.weight"] - first).norm() for f in (free, pulled)]
    assert moved[1] < 0.8 * moved[0]


def test_first_step_has_no_pull():
    assert check_step(tiny_federation([Prox(mu=3.0)], **ONE), 0) == 0.0


# ---- the pull beside autograd, as on a GPU ---------------------------------------------------------------------------

@pytest.mark.parametrize("parts", [[Prox(mu=2.0)], [Dyn(alpha=0.5)], [Prox(mu=2.0), Cm()], [Prox(mu=2.0), Per()]], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_past_autograd_it_is_the_same_pull(monkeypatch: pytest.MonkeyPatch, parts: list[Part], layout: str):
    through = run_tiny(parts, layout=layout)
    seen: list[str] = []
    monkeypatch.setattr(correction, "DEVICE", "cpu")
    pulled = correction.pulled
    monkeypatch.setattr(correction, "pulled", lambda g, *more: (seen.extend(g), pulled(g, *more))[1])
    past = run_tiny(parts, layout=layout)
    assert seen
    assert largest_difference(through, past) < 1e-6


@pytest.mark.parametrize("other", [Sam(rho=0.1), Scaffold()], ids=str)
def test_where_another_part_takes_the_gradient_first_it_goes_through_autograd(monkeypatch: pytest.MonkeyPatch, other: Part):
    through = run_tiny([Prox(mu=2.0), other], rounds=1)
    monkeypatch.setattr(correction, "DEVICE", "cpu")
    assert not differences(through, run_tiny([Prox(mu=2.0), other], rounds=1))


def test_past_autograd_the_loss_holds_the_squared_norm_and_the_pull_is_the_one_by_hand(monkeypatch: pytest.MonkeyPatch):
    # the same numbers as above: losses 0.5, 0.415, 0.37335, and w = 0.219 after three steps
    monkeypatch.setattr(correction, "DEVICE", "cpu")
    fed = scalars([Prox(mu=2.0)], [1.0], [3])
    assert fed.round().losses[0] == pytest.approx((0.5 + 0.415 + 0.37335) / 3, abs=1e-6)
    assert weight(fed) == pytest.approx(0.219, abs=1e-6)
