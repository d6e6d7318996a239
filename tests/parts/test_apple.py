"""APPLE: cores, weights and mixtures by hand, what fades, what is sent, and who must take part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratic import W, scalars

from consilience.core.part import Part
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts import parse_stack
from consilience.parts.apple import Apple
from consilience.parts.dann import Dann
from consilience.parts.ntd import Ntd
from consilience.testing import ReplayedSequential, differences, run_tiny, tiny_federation

TWO = Apple(weights_lr=0.01, mu=0.5, fade=2, schedule="cosine")


def core(fed: Any, number: int) -> float:
    return fed.client(number).tensors["local"][W].item()


def weights(fed: Any, number: int) -> list[float]:
    return fed.client(number).tensors["kept"]["apple"]["p"].tolist()


def mixture(fed: Any, number: int) -> float:
    return fed.personal_model(number)[0]["params"][W].item()


def test_two_rounds_by_hand() -> None:
    """ℓ(θ) = ½(θ − a)², a = 1 and −1, all cores 2 at first, shares ½ each; η = 0.1, η_p = 0.01, μ = 0.5, the pull fades over 2 rounds.

    Round 1. Client 0: θ = ½·2 + ½·2 = 2, g = 1, core 2 − 0.1·½·1 = 1.95. Along both cores 1·2 = 2, no pull: p = ½ − 0.02 = 0.48 twice.
    Its mixture is then 0.48·1.95 + 0.48·2 = 1.896. Client 1: g = 3, core 1.85, along 6, p = 0.44 twice, mixture 0.44·(2 + 1.85) = 1.694.
    Round 2. λ = (1 + cos(π/2))/2 = ½, so the pull is 2·½·0.5 = 0.5 times p − ½. Client 0: θ = 0.48·(1.95 + 1.85) = 1.824, g = 0.824,
    core 1.95 − 0.1·0.48·0.824 = 1.910448. p₀ = 0.48 − 0.01·(0.824·1.95 + 0.5·(−0.02)) = 0.464032 and
    p₁ = 0.48 − 0.01·(0.824·1.85 − 0.01) = 0.464856.
    Round 3. No pull is left. θ = 0.464032·1.910448 + 0.464856·core₁.
    """
    fed = scalars([TWO], [1.0, -1.0], [1, 1], start=2.0)
    fed.round()
    assert [core(fed, i) for i in (0, 1)] == pytest.approx([1.95, 1.85])
    assert weights(fed, 0) == pytest.approx([0.48, 0.48])
    assert weights(fed, 1) == pytest.approx([0.44, 0.44])
    assert [mixture(fed, i) for i in (0, 1)] == pytest.approx([1.896, 1.694])
    fed.round()
    assert core(fed, 0) == pytest.approx(1.910448)
    assert weights(fed, 0) == pytest.approx([0.464032, 0.464856])
    assert mixture(fed, 0) == pytest.approx(0.464032 * 1.910448 + 0.464856 * 1.85)
    other = core(fed, 1)
    fed.round()
    g = 0.464032 * 1.910448 + 0.464856 * other - 1
    assert weights(fed, 0) == pytest.approx([0.464032 - 0.01 * g * 1.910448, 0.464856 - 0.01 * g * other], abs=1e-6)


def test_own_core_moves_within_a_round_and_the_others_stand_still() -> None:
    """Two batches, η_p = 0 and shares ⅔, ⅓ (2 samples and 1): θ = 2, g = 1, core 2 − 0.1·⅔ = 1.9333…; then θ = ⅔·1.9333… + ⅓·2 = 1.9555…,
    g = 0.9555…, core 1.9333… − 0.1·⅔·0.9555… = 1.8696296….
    """
    fed = scalars([Apple(weights_lr=0.0)], [1.0, 5.0], [2, 1], start=2.0)
    fed.round()
    assert fed.shared["apple"]["share"].tolist() == pytest.approx([2 / 3, 1 / 3])
    first = 2 - 0.1 * 2 / 3
    assert core(fed, 0) == pytest.approx(first - 0.1 * 2 / 3 * (2 / 3 * first + 2 / 3 - 1))
    assert core(fed, 0) == pytest.approx(1.8696296, abs=1e-6)
    assert weights(fed, 0) == pytest.approx([2 / 3, 1 / 3])


def test_longer_steps_of_the_core_by_hand() -> None:
    """As round 1 above, twice as far for two clients: 2 − 0.1·2·½·1 = 1.9 and 2 − 0.1·2·½·3 = 1.7. The weights' steps are the same."""
    fed = scalars([Apple(weights_lr=0.01, core_steps="scaled")], [1.0, -1.0], [1, 1], start=2.0)
    fed.round()
    assert [core(fed, i) for i in (0, 1)] == pytest.approx([1.9, 1.7])
    assert weights(fed, 0) == pytest.approx([0.48, 0.48])


@pytest.mark.parametrize(("schedule", "expected"), [
    ("cosine", [1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2, 0.0, 0.0]),
    ("exponential", [1.0, 10**-0.75, 10**-1.5, 10**-2.25, 0.0, 0.0])])
def test_the_pull_fades_over_so_many_rounds(schedule: str, expected: list[float]) -> None:
    assert [Apple(fade=4, schedule=schedule)._fading(r) for r in range(6)] == pytest.approx(expected)
    assert Apple(fade=0, schedule=schedule)._fading(0) == 0.0


def test_a_client_without_a_step_has_no_share_and_no_say() -> None:
    """Client 2 of the tiny federation cannot fill a batch: the shares are of 24, 17 and 40 samples."""
    fed = run_tiny([Apple()], rounds=1)
    assert fed.shared["apple"]["share"].tolist() == pytest.approx([24 / 81, 17 / 81, 0.0, 40 / 81])
    model, _ = fed.personal_model(2)
    assert torch.equal(model["params"]["head.weight"], fed.model["params"]["head.weight"])


def test_who_is_late_finds_the_cores_as_they_are_and_who_is_absent_keeps_its_own() -> None:
    """In rounds that name their clients, as a federation whose sites fail."""
    fed = scalars([TWO], [1.0, -1.0], [1, 1], start=2.0)
    fed.round([0])
    assert mixture(fed, 1) == 2.0                                               # the initial model
    fed.round([1])                                                              # θ = ½·1.95 + ½·2 = 1.975, g = 2.975
    assert core(fed, 1) == pytest.approx(2 - 0.05 * 2.975)
    assert weights(fed, 1) == pytest.approx([0.5 - 0.01 * 2.975 * 1.95, 0.5 - 0.01 * 2.975 * 2])
    assert (core(fed, 0), weights(fed, 0)) == (pytest.approx(1.95), pytest.approx([0.48, 0.48]))
    assert fed.server["apple"]["cores"][W].flatten().tolist() == pytest.approx([core(fed, 0), core(fed, 1)])


def test_what_travels() -> None:
    """Down: the cores of the three others, and the shares once. Up: sizes once, the own core in every round."""
    fed = tiny_federation([Apple()], sizes=(24, 17, 16, 40))
    size = sum(p.numel() * 4 for p in fed.model["params"].values())
    prepared = fed.prepare()
    assert prepared.bytes_up == 4 * 4 * 4
    first, second = fed.round(), fed.round()
    assert (first.bytes_down, second.bytes_down) == (4 * 3 * size + 4 * 4 * 4, 4 * 3 * size)
    assert first.bytes_up == second.bytes_up == 4 * size


def test_statistics_stay_with_the_client() -> None:
    fed = run_tiny([Apple()], rounds=1)
    assert fed.personal_model(0)[0]["buffers"]["stage1.1.num_batches_tracked"].item() == 6
    assert fed.no_global_model


def test_only_what_trains_is_mixed(open_round: Any) -> None:
    """What another part has attached and steps by itself is the client's own: weights that do not add up to 1 would scale it."""
    opened = open_round(Apple(), Dann(), rounds_before=1)
    taken = opened.step()
    assert taken.moved("dann.0.weight").abs().sum() > 0
    assert not any(k.startswith("dann.") for k in opened.slot.scratch["apple"]["cores"])


@pytest.mark.parametrize("parts", [(TWO,), (TWO, Ntd())], ids=["alone", "ntd"])
def test_steps_can_be_captured(parts: tuple[Part, ...]) -> None:
    how = {"sizes": (16, 9, 5)}
    assert not differences(run_tiny(parts, **how), run_tiny(parts, engine=ReplayedSequential, **how))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="apple needs at least two clients"):
        tiny_federation([Apple()], sizes=(24,))
    with pytest.raises(ConfigError, match=r"apple sends whole models to other clients.*batchnorm=params"):
        tiny_federation([Apple()], batchnorm="local")
    for participation in (0.5, 3.0):
        with pytest.raises(ConfigError, match=r"apple learns weights of all clients' cores.*participation=1"):
            tiny_federation([Apple()], participation=participation)
    tiny_federation([Apple()], participation=4.0)
    for text, reason in {"apple+fedavgm": "apple has no global model", "apple+fedfomo": "both claim the question of what travels",
                         "apple+fedsam": "both define `gradient`", "apple+fedgen": "apple has local head"}.items():
        with pytest.raises(RefusedCombination, match=reason):
            parse_stack(text).method()
