"""Per-FedAvg on parabolas, where the step after a step can be done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, features, next_batch, plain_net
from quadratic import Quadratic, Vector, W, scalars, vectors, weight

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data.federated import as_float
from consilience.engines import Sequential
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts import PARTS
from consilience.parts.maml import Maml
from consilience.parts.prbm import Prbm
from consilience.parts.prox import Prox
from consilience.testing import differences, in_model, run_tiny, tiny_federation


def several(part: Part, values: list[float], **policy: Any) -> Federation:
    """One client whose samples are these numbers, all in one batch."""
    n = len(values)
    people = Population(torch.tensor(values)[:, None], torch.zeros(n, dtype=torch.int64), (torch.arange(n),), 1, as_float)
    settings = {"lr": 0.1, "batch": n} | policy
    return Federation(Vector((0.0,)), Layout(), Method([Quadratic(), part]), people, Policy(**settings), Sequential)


def drawn(fed: Federation, round_number: int = 1) -> list[float]:
    """The samples of the first step, in its order."""
    return fed.samples.x[fed.samples.order(0, round_number, fed.samples.schedule(0, fed.phases))[0]].flatten().tolist()


def test_first_order_by_hand() -> None:
    """ℓ = ½(w − 1)², w = 0, η = 0.1, α = 2η = 0.2: w̃ = 0.2, its gradient −0.8, w = 0.08. Then w̃ = 0.08 + 0.2·0.92 = 0.264, the gradient
    −0.736, w = 0.1536. Served: a step of α more, 0.1536 + 0.2·0.8464 = 0.32288.
    """
    fed = scalars([Maml(alpha=2.0)], [1.0], [4], batch=2)
    fed.round()
    assert weight(fed) == pytest.approx(0.1536, abs=1e-6)
    model, taps = fed.personal_model(0)
    assert model["params"][W].item() == pytest.approx(0.32288, abs=1e-6)
    assert taps


def test_hessian_free_by_hand() -> None:
    """ℓ(w̃) = ½(1 − α)²(w − 1)² has the gradient (1 − α)²(w − 1) = −0.64 at 0: the second derivative is 1, so the difference is g itself
    and g − αg = −0.8·0.8. w = 0.064.
    """
    fed = scalars([Maml(alpha=2.0, order="hessian_free")], [1.0], [3], batch=3)
    fed.round()
    assert weight(fed) == pytest.approx(0.064, abs=1e-5)


def test_pieces_are_different_samples_by_hand() -> None:
    """Samples a, b in the order drawn, α = 0.2: w̃ = 0.2a, the gradient 0.2a − b, w = 0.1b − 0.02a. FedAvg has 0.05(a + b)."""
    fed = several(Maml(alpha=2.0), [1.0, 3.0])
    a, b = drawn(fed)
    fed.round()
    assert {a, b} == {1.0, 3.0}
    assert weight(fed) == pytest.approx(0.1 * b - 0.02 * a, abs=1e-6)


def test_pieces_of_an_odd_batch_by_hand() -> None:
    """Of three samples the first two adapt: w̃ = 0.1·mean(a, b), the gradient w̃ − c. Of thirds each has one."""
    fed = several(Maml(), [1.0, 3.0, 8.0])
    a, b, c = drawn(fed)
    fed.round()
    assert weight(fed) == pytest.approx(0.1 * (c - 0.1 * (a + b) / 2), abs=1e-6)
    fed = several(Maml(order="hessian_free"), [1.0, 3.0, 8.0])
    fed.round()
    assert weight(fed) == pytest.approx(0.1 * (b - 0.1 * a) * 0.9, abs=1e-5)             # the third sample gives its curvature alone


def test_other_terms_are_adapted_to_as_well() -> None:
    """Prox at μ = 1: no pull at w = 0, but 0.2 at w̃ = 0.2: the gradient is −0.8 + 0.2, w = 0.06."""
    fed = scalars([Maml(alpha=2.0), Prox(mu=1.0)], [1.0], [2], batch=2)
    fed.round()
    assert weight(fed) == pytest.approx(0.06, abs=1e-6)


def test_alpha_follows_the_learning_rate() -> None:
    """η = 0.1, then 0.05 with α = 2η = 0.1: w = 0.08 + 0.05·0.9·0.92 = 0.1214; served at α = 0.1: 0.1214 + 0.1·0.8786."""
    fed = scalars([Maml(alpha=2.0)], [1.0], [2], batch=2, schedule="exponential(gamma=0.5)")
    fed.round(), fed.round()
    assert weight(fed) == pytest.approx(0.1214, abs=1e-6)
    assert fed.personal_model(0)[0]["params"][W].item() == pytest.approx(0.1214 + 0.1 * 0.8786, abs=1e-6)


@pytest.mark.parametrize(("adapt", "left"), [(0, 0.92), (1, 0.92 * 0.8), (3, 0.92 * 0.8**3)])
def test_steps_of_adaptation_by_hand(adapt: int, left: float) -> None:
    """Each step at α = 0.2 leaves 0.8 of the way to 1, also where an epoch has one batch only."""
    fed = scalars([Maml(alpha=2.0, adapt=adapt)], [1.0, 1.0], [2, 2], batch=2)
    fed.round([0])
    for number in (0, 1):                                                               # the one that was not there too
        assert fed.personal_model(number)[0]["params"][W].item() == pytest.approx(1 - left, abs=1e-6)
    assert weight(fed) == pytest.approx(0.08, abs=1e-6)


def test_without_a_batch_a_client_is_served_the_global_model() -> None:
    fed = scalars([Maml(alpha=2.0)], [1.0, 1.0], [2, 1], batch=2)
    fed.round()
    assert fed.personal_model(1)[0]["params"][W].item() == weight(fed)


def test_statistics_move_once_a_step() -> None:
    """Client 0 makes 3 batches × 2 epochs; only the pass over the first piece is counted. Adaptation counts one more, for itself."""
    fed = run_tiny([Maml(order="hessian_free")], rounds=1, order=[0])
    assert fed.model["buffers"]["stage1.1.num_batches_tracked"].item() == 6
    assert fed.personal_model(0)[0]["buffers"]["stage1.1.num_batches_tracked"].item() == 7


def test_fedavg_without_adaptation() -> None:
    fed = run_tiny([Maml(alpha=0.0)])
    assert not differences(run_tiny(), fed, only=in_model)
    assert torch.equal(fed.personal_model(0)[0]["params"]["head.weight"], fed.model["params"]["head.weight"])
    assert differences(run_tiny(), run_tiny([Maml()]), only=in_model)


def test_personal_tensors_move_by_the_adapted_pass() -> None:
    """DBE's shift, 0 at first, has its gradient from the second piece at w̃, as the model has. Against plain modules."""
    fed = tiny_federation([Maml(alpha=4.0), Prbm()], **ONE)
    net, (x, y) = plain_net(fed.model), next_batch(fed, 0)
    g = torch.autograd.grad(F.cross_entropy(net(x[:4]), y[:4]), list(net.parameters()))
    with torch.no_grad():
        for p, a in zip(net.parameters(), g):
            p -= 4 * 0.05 * a
    shift = torch.zeros(12, requires_grad=True)
    (g,) = torch.autograd.grad(F.cross_entropy(net.head(features(net, x[4:]) + shift), y[4:]), [shift])
    fed.round([0])
    torch.testing.assert_close(fed.client(0).tensors["personal"]["prbm"]["shift"], -0.05 * g, atol=2e-6, rtol=1e-5)


def test_pieces_that_are_too_small() -> None:
    """A last batch that cannot be cut is left out; a run whose batches cannot is refused. BatchNorm needs two samples in each piece."""
    fed = scalars([Maml(alpha=2.0)], [1.0], [3], batch=2, last_batch="keep")
    fed.round()
    assert weight(fed) == pytest.approx(0.08, abs=1e-6)                                 # one step, not two
    assert tiny_federation([Maml()]).samples.smallest == 4
    assert tiny_federation([Maml(order="hessian_free")]).samples.smallest == 6
    assert tiny_federation([Maml(), PARTS["gen"](**PARTS["gen"].trial)]).samples.smallest == 4
    assert tiny_federation([Maml(alpha=0.0)]).samples.smallest == 2
    with pytest.raises(ConfigError, match=r"at least 2 .* cut in 2"):
        scalars([Maml()], [1.0], [3], batch=1)
    with pytest.raises(ConfigError, match=r"at least 6 .* cut in 3"):
        tiny_federation([Maml(order="hessian_free")], batch=5)


def test_vectors_by_hand() -> None:
    """(3, 4) and α = 0.5: the gradient halves, (−1.5, −2), η = 0.1 and w = (0.15, 0.2)."""
    fed = vectors([Maml(alpha=5.0)], [(3.0, 4.0)], [2], (0.0, 0.0), batch=2)
    fed.round()
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([0.15, 0.2], abs=1e-6)


@pytest.mark.parametrize(("other", "reason"), [
    ("sam", "both define `gradient`"), ("babu", "both define `personalise`"), ("ditto", "both define `personalise`"),
    ("apfl", "both define `personalise`"), ("local", "local has no global model"), ("fomo", "fomo has no global model"),
    ("union", "maml has personal models")])
def test_refusals(other: str, reason: str) -> None:
    with pytest.raises(RefusedCombination, match=reason):
        Method([Maml(), PARTS[other](**PARTS[other].trial)])
