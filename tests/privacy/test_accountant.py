"""ε against formulas written out here: the Gaussian mechanism's closed form, and Rényi divergences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.privacy import ledger
from consilience.privacy.accountant import ORDERS, epsilon_of, rdp_of, sampled_epsilon_of


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def delta_of(epsilon: float, sigma: float) -> float:
    """Balle and Wang (2018), Theorem 8, sensitivity 1: δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ)."""
    return phi(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * phi(-1 / (2 * sigma) - epsilon * sigma)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
def test_one_release_is_the_closed_form(sigma: float, delta: float) -> None:
    assert delta_of(epsilon_of(1 / sigma**2, delta), sigma) == pytest.approx(delta, rel=1e-6)


def test_a_known_value() -> None:
    """σ = 1 and δ = 1e-5: δ(4.377) by the formula above is 1.0006e-5, δ(4.378) is 0.9965e-5; so ε lies between."""
    assert delta_of(4.377, 1.0) > 1e-5 > delta_of(4.378, 1.0)
    assert 4.377 < epsilon_of(1.0, 1e-5) < 4.378


@given(st.lists(st.floats(0.3, 20.0), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_many_releases_are_one_with_less_noise(multipliers: list[float]) -> None:
    """Independent Gaussians with deviations z₁, z₂ … of the same shift are one Gaussian whose squared ratio is Σ 1/z²."""
    spent = sum(1 / z**2 for z in multipliers)
    assert epsilon_of(spent, 1e-5) == pytest.approx(epsilon_of(1 / ((1 / spent) ** 0.5) ** 2, 1e-5), rel=1e-6)
    assert epsilon_of(spent, 1e-5) >= epsilon_of(max(1 / z**2 for z in multipliers), 1e-5) - 1e-9


def test_nothing_released_and_no_noise() -> None:
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(math.inf, 1e-5) == math.inf
    assert sampled_epsilon_of([0.0] * ORDERS, 1e-5) == 0.0


def test_divergences_without_sampling_are_alpha_over_two_sigma_squared() -> None:
    from dp_accounting.rdp import RdpAccountant
    orders = RdpAccountant().orders
    assert len(orders) == ORDERS
    sigma = 1.7
    assert rdp_of(1 / sigma**2, 10, 10) == pytest.approx([a / (2 * sigma**2) for a in orders])


def test_divergences_with_sampling_follow_the_published_bound() -> None:
    """Wang, Balle, Kasiviswanathan (2019), order 2: log(1 + q²·C(2,2)·min(4(e^ρ − 1), 2e^ρ)), ρ = ε(2) = 2/(2σ²)."""
    from dp_accounting.rdp import RdpAccountant
    at_two = list(RdpAccountant().orders).index(2.0)
    for sigma in (0.8, 2.0):
        rho, q = 1 / sigma**2, 10 / 100
        expected = math.log(1 + q**2 * min(4 * (math.exp(rho) - 1), 2 * math.exp(rho)))
        assert rdp_of(1 / sigma**2, 10, 100)[at_two] == pytest.approx(expected)


def test_conversion_of_composed_divergences() -> None:
    """T rounds: ε = min over orders of T·rdp(α) + log((α − 1)/α) − (log δ + log α)/(α − 1) (Canonne, Kamath, Steinke 2020)."""
    from dp_accounting.rdp import RdpAccountant
    rounds, delta, one = 50, 1e-5, rdp_of(1 / 4.0, 10, 100)
    by_hand = min(rounds * r + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
                  for a, r in zip(RdpAccountant().orders, one) if a > 1.01)
    assert sampled_epsilon_of([rounds * r for r in one], delta) == pytest.approx(by_hand, rel=1e-6)


def test_sampling_helps_over_many_rounds() -> None:
    """A tenth of the clients in each of 100 rounds tells less than the exact count for one that takes part in all of them."""
    sampled = sampled_epsilon_of([100 * r for r in rdp_of(4 / 2.0**2, 10, 100)], 1e-5)
    assert sampled < epsilon_of(100 * 4 / 2.0**2, 1e-5)


# ---- the ledger ----------------------------------------------------------------------------------------------------

def test_shares_of_clients_that_did_not_arrive_are_missing() -> None:
    """z = 2 made for 4 clients: each adds (2C)²/4; with 3 the sum has 3C² of variance, so Σ 1/z² grows by 1/3, not 1/4."""
    state = ledger.record(ledger.fresh(6), {"finish": [0, 2, 5]}, {"finish": [0, 2, 3, 5]}, noise=2.0, place="client", cohort=4,
                          population=6)
    assert state["spent"].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 0, 1 / 3])
    assert state["seen"].tolist() == pytest.approx([1.0, 0, 1.0, 1.0, 0, 1.0])     # one upload: variance C² against C; also the late one
    assert state["releases"].tolist() == [1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(("place", "seen"), [("server", math.inf), ("local", 0.25)])
def test_whole_noise_does_not_depend_on_who_arrives(place: str, seen: float) -> None:
    state = ledger.record(ledger.fresh(4), {"finish": [1]}, {"finish": [1]}, noise=2.0, place=place, cohort=4, population=4)
    assert state["spent"].tolist() == [0, 0.25, 0, 0]
    assert state["seen"].tolist() == [0, seen, 0, 0]


def test_several_releases_of_a_round_add_up_and_each_has_its_own_clients() -> None:
    releases = {"survey anchors": [0, 1, 2], "finish": [0, 2]}
    asked = {name: [0, 1, 2] for name in releases}
    state = ledger.record(ledger.fresh(3), releases, asked, noise=1.0, place="server", cohort=3, population=3)
    assert state["spent"].tolist() == [2, 1, 2]
    assert not state["rdp"].any()                                     # everybody is drawn: nothing is gained, nothing is counted


def test_a_round_of_several_releases_is_one_sampled_release() -> None:
    """The same cohort makes both, so that they are one Gaussian with Σ 1/z² = 2; replaced data move a sum by 2C, so four times that."""
    releases = {"survey x": [0, 1], "finish": [0, 1]}
    state = ledger.record(ledger.fresh(10), releases, releases, noise=1.0, place="server", cohort=2, population=10)
    assert state["rdp"].tolist() == pytest.approx(rdp_of(8.0, 2, 10))


def test_preparation_is_made_by_all() -> None:
    """Shares are made for the whole population, and no sampling hides who took part."""
    all_of_them = {"prepare mr": [0, 1, 2, 3]}
    state = ledger.record(ledger.fresh(4), all_of_them, all_of_them, noise=1.0, place="client", cohort=2, population=4)
    assert state["spent"].tolist() == [1, 1, 1, 1]
    assert state["rdp"].tolist() == pytest.approx(rdp_of(4.0, 4, 4))


def test_the_report_speaks_of_the_most_exposed_client() -> None:
    state = ledger.fresh(3)
    for ids in ([0, 1], [1, 2], [1, 2]):
        state = ledger.record(state, {"finish": ids}, {"finish": ids}, noise=2.0, place="server", cohort=2, population=3)
    said = ledger.report(state, delta=1e-6, sampled=True, secret=False)
    assert said["releases"] == 3
    assert delta_of(said["epsilon"], 2.0 / 3**0.5) == pytest.approx(1e-6, rel=1e-6)
    assert delta_of(said["epsilon_replace"], 1.0 / 3**0.5) == pytest.approx(1e-6, rel=1e-6)
    assert said["epsilon_sampled"] == pytest.approx(sampled_epsilon_of([3 * r for r in rdp_of(1.0, 2, 3)], 1e-6))
    assert said["epsilon_server"] is None
    assert said["noise"] == "keyed"


def test_without_noise_there_is_no_bound() -> None:
    state = ledger.record(ledger.fresh(2), {"finish": [0]}, {"finish": [0]}, noise=0.0, place="client", cohort=2, population=2)
    said = ledger.report(state, delta=1e-5, sampled=True, secret=True)
    assert said["epsilon"] is said["epsilon_replace"] is said["epsilon_sampled"] is said["epsilon_server"] is None
    assert said["noise"] == "secret"


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), min_size=1, max_size=6), st.floats(0.5, 5.0))
@settings(max_examples=25, deadline=None)
def test_order_of_rounds_and_of_clients_does_not_matter(rounds: list[list[int]], noise: float) -> None:
    one, other = ledger.fresh(5), ledger.fresh(5)
    for ids in rounds:
        one = ledger.record(one, {"finish": ids}, {"finish": ids}, noise=noise, place="client", cohort=5, population=5)
    for ids in reversed(rounds):
        other = ledger.record(other, {"finish": ids[::-1]}, {"finish": ids}, noise=noise, place="client", cohort=5, population=5)
    for key in one:
        torch.testing.assert_close(one[key], other[key])
