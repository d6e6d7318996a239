"""pFedMe: personal and global model by hand, what is kept and scored, and the pass that its steps begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quadratic import W, scalars, weight

from consilience.core.part import Part
from consilience.errors import NonFiniteError, RefusedCombination
from consilience.parts import parse_stack
from consilience.parts.dann import Dann
from consilience.parts.moreau import Moreau
from consilience.parts.mr import Mr
from consilience.parts.per import Per
from consilience.parts.rep import Rep
from consilience.testing import ReplayedSequential, differences, run_tiny, tiny_federation


def theta(fed: Any, number: int = 0) -> float:
    return fed.client(number).tensors["kept"]["moreau"]["model"]["params"][W].item()


def test_two_batches_by_hand() -> None:
    """ℓ(θ) = ½(θ − 1)², w = θ = 0, η = 0.1, λ = 2, K = 2, η_p = 0.25, no decay.

    Batch 1: θ = 0 − ¼((0 − 1) + 2·0) = 0.25; θ = 0.25 − ¼(−0.75 + 2·0.25) = 0.3125; w = 0 − 0.1·2·(0 − 0.3125) = 0.0625.
    Batch 2, from that θ: θ = 0.3125 − ¼(−0.6875 + 2·0.25) = 0.359375; θ = 0.359375 − ¼(−0.640625 + 2·0.296875) = 0.37109375;
    w = 0.0625 + 0.2·(0.37109375 − 0.0625) = 0.12421875. In round 2 θ begins at that w: with e = w − 1 = −0.87578125 the first step is
    θ = w − ¼e = 0.3431640625, the second 0.3431640625 − ¼(−0.6568359375 + 2·0.2189453125) = 0.397900390625.
    """
    fed = scalars([Moreau(weight=2.0, steps=2, inner_lr=0.25, decay=0.0)], [1.0], [2])
    fed.round()
    assert theta(fed) == pytest.approx(0.37109375)
    assert weight(fed) == pytest.approx(0.12421875)
    assert fed.personal_model(0)[0]["params"][W].item() == pytest.approx(0.37109375)
    one = scalars([Moreau(weight=2.0, steps=2, inner_lr=0.25, decay=0.0)], [1.0], [1], start=0.12421875)
    one.round()
    assert theta(one) == pytest.approx(0.397900390625)


def test_decay_and_the_servers_step_by_hand() -> None:
    """K = 1, λ = 2, η_p = 0.5, decay 0.4, w = 1, targets 3 and −1: θ = 1 − ½((1 − 3) + 0 + 0.4) = 1.8 and 1 − ½(2 + 0.4) = −0.2.
    w_i = 1 + 0.2·(θ − 1) = 1.16 and 0.76, mean 0.96. β = 2: 1 + 2·(0.96 − 1) = 0.92; β = 0.5: 0.98.
    """
    for beta, after in ((1.0, 0.96), (2.0, 0.92), (0.5, 0.98)):
        fed = scalars([Moreau(weight=2.0, steps=1, inner_lr=0.5, decay=0.4, beta=beta)], [3.0, -1.0], [1, 1], start=1.0)
        fed.round()
        assert [theta(fed, i) for i in (0, 1)] == pytest.approx([1.8, -0.2], abs=1e-6)
        assert weight(fed) == pytest.approx(after, abs=1e-6)


def test_many_inner_steps_are_a_step_on_the_envelope() -> None:
    """At the optimum θ = (a + λw)/(1 + λ), and w moves by −ηλ(w − θ) = −η·λ/(1 + λ)·(w − a): for a = 1, λ = 4, w = 0: 0.1·0.8."""
    fed = scalars([Moreau(weight=4.0, steps=60, inner_lr=0.1, decay=0.0)], [1.0], [1])
    fed.round()
    assert theta(fed) == pytest.approx(0.2, abs=1e-5)
    assert weight(fed) == pytest.approx(0.08, abs=1e-5)


def test_momentum_is_that_of_the_global_model() -> None:
    """The run's momentum acts on w's steps: two batches of g₁ = 2(0 − θ₁), g₂ = 2(w₁ − θ₂) with ρ = 0.5 and K = 1, η_p = 0.25, a = 1.

    θ₁ = 0.25, g₁ = −0.5, w₁ = 0.05. θ₂ = 0.25 − ¼(−0.75 + 2·0.2) = 0.3375, g₂ = 2(0.05 − 0.3375) = −0.575, m = −0.25 − 0.575 = −0.825,
    w₂ = 0.05 + 0.0825 = 0.1325.
    """
    fed = scalars([Moreau(weight=2.0, steps=1, inner_lr=0.25, decay=0.0)], [1.0], [2], momentum=0.5)
    fed.round()
    assert theta(fed) == pytest.approx(0.3375)
    assert weight(fed) == pytest.approx(0.1325)


def test_who_never_took_part_is_served_the_global_model_and_who_did_its_own() -> None:
    fed = scalars([Moreau(weight=2.0, steps=1, inner_lr=0.25)], [1.0, -1.0], [1, 1])
    fed.round([0])
    assert fed.personal_model(1)[0]["params"][W].item() == weight(fed) != 0.0
    mine = theta(fed)
    fed.round([1])                                                              # absent clients keep their model
    assert fed.personal_model(0)[0]["params"][W].item() == mine
    assert fed.personal_model(1)[0]["params"][W].item() == theta(fed, 1) != weight(fed)


def test_statistics_move_once_a_batch_and_stay_with_the_personal_model() -> None:
    """Client 0 makes 3 batches × 2 epochs, whatever K is; the personal model has the statistics of its own client."""
    fed = run_tiny([Moreau(steps=4)], rounds=1)
    own = fed.client(0).tensors["kept"]["moreau"]["model"]["buffers"]
    assert own["stage1.1.num_batches_tracked"].item() == 6
    assert not torch.equal(own["stage1.1.running_mean"], fed.model["buffers"]["stage1.1.running_mean"])


@dataclass(frozen=True)
class Watcher(Part):
    """Notes in `grad` what the step shows: the model, and the loss of the pass."""

    name, rank = "watcher", 99

    def init_scratch(self, c: Any) -> Any:
        return {"logits": torch.zeros(8, 3)}

    def track(self, v: Any) -> Any:
        return {"logits": v.trace.logits}

    def grad(self, v: Any, g: Any) -> Any:
        assert torch.equal(v.trace.logits, v.scratch["logits"])
        return {k: t + 0 * v.params[k] for k, t in g.items()}


def test_later_hooks_of_the_step_see_the_first_pass_and_the_model_itself(open_round: Any) -> None:
    """In the second step θ is not w: logits are θ's before its steps, and so are terms; `v.params` is w."""
    opened = open_round(Moreau(inner_lr=0.1), Watcher())
    opened.step()
    taken = opened.step()
    at = {**taken.before["model"]["params"], **taken.before["scratch"]["moreau"]["theta"]}
    model = {"params": at, "buffers": taken.before["model"]["buffers"]}
    logits = opened.fed.program.network.forward(model, taken.batch.x, train=True).logits
    torch.testing.assert_close(taken.trace.logits, logits)
    assert float(taken.terms["task"]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, taken.batch.y)), rel=1e-5)
    for k, g in taken.grads.items():
        torch.testing.assert_close(g, 15 * (taken.before["model"]["params"][k] - taken.after["scratch"]["moreau"]["theta"][k]))


def test_adversaries_step_what_they_attached(open_round: Any) -> None:
    """DANN's discriminator is stepped once a batch on the model itself, and is no part of θ."""
    opened = open_round(Moreau(steps=3), Dann())
    first = opened.step()
    assert first.moved("dann.0.weight").abs().sum() > 0
    assert not any(k.startswith("dann.") for k in first.after["scratch"]["moreau"]["theta"])
    alone = open_round(Dann()).step()                                           # in the first step θ = w: the same pass
    torch.testing.assert_close(first.moved("dann.0.weight"), alone.moved("dann.0.weight"))


def test_every_phase_moves_its_own_keys(open_round: Any) -> None:
    opened = open_round(Moreau(), Rep())
    for taken in opened.rest():
        before, after = (t["scratch"]["moreau"]["theta"] for t in (taken.before, taken.after))
        moved = {k for k in before if not torch.equal(before[k], after[k])}
        assert moved == set(taken.phase.keys)


@pytest.mark.parametrize("parts", [(Moreau(steps=2),), (Moreau(), Mr(kappa=1.0)), (Moreau(beta=2.0, decay=0.0), Per())], ids=str)
def test_steps_can_be_captured(parts: tuple[Part, ...]) -> None:
    how = {"sizes": (16, 9, 5)}
    assert not differences(run_tiny(parts, **how), run_tiny(parts, engine=ReplayedSequential, **how))


def test_refusals() -> None:
    for text, reason in {"pfedme+local": "local has no global model", "pfedme+fedsam": "both define `gradient`",
                         "pfedme+ditto": "both define `personalise`", "pfedme+union": "moreau has personal models"}.items():
        with pytest.raises(RefusedCombination, match=reason):
            parse_stack(text).method()
    tiny_federation(parse_stack("pfedme(weight=3, inner_lr=0.1)+scaffold").parts)


def test_personal_steps_that_lead_away_are_warned_of_and_named_as_the_cause() -> None:
    """ℓ(θ) = ½(θ − 1)², w = 0, η_p = 0.1, λ = 30: θ ← θ − 0.1((θ − 1) + 30θ) = 0.1 − 2.1θ, so that θ more than doubles with every step.
    The run's learning rate has no part in it, and was named as the cause."""
    fed = tiny_federation([Moreau()])
    assert Moreau(weight=20.0, inner_lr=0.1).caution(fed.spec) is None                    # 1 − 2: to the other side, not farther
    said = Moreau(weight=30.0, inner_lr=0.1).caution(fed.spec)
    assert said is not None
    assert "inner_lr·weight = 3:" in said
    assert "moreau.inner_lr below 0.0667" in said
    one = scalars([Moreau(weight=30.0, steps=2, inner_lr=0.1, decay=0.0)], [1.0], [1], lr=1e-9)
    one.round()
    assert theta(one) == pytest.approx(0.1 - 2.1 * 0.1)
    wild = tiny_federation([Moreau(weight=30.0, inner_lr=0.1, steps=200)], lr=1e-9)
    with pytest.raises(NonFiniteError, match=r"round 1, step 1\. The likely cause: moreau has inner_lr·weight = 3: .* If that is not it"):
        wild.round()
