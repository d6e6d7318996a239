"""LfD's drift label, margin and loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consilience.core.method import Method
from consilience.errors import RefusedCombination
from consilience.parts.cosine import Cosine
from consilience.parts.drift import Drift
from consilience.parts.mixup import Mixup
from consilience.testing import differences, in_model, run_tiny, tiny_net

VARIANTS: list[dict[str, Any]] = [{}, {"first": "uniform"}, {"margin_in_reg": False}, {"drift_tau": 0.1}, {"margin": 0.0},
                                  {"weight": 0.5}, {"tau": 0.05}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Drift(**settings))


LN = math.log


def view(logits: Any, target: Any, received: Any = None, previous: Any = None, first: bool = False) -> Any:
    """A step with given logits of the model in training and of the two frozen ones."""
    models = {"received": torch.tensor(received or [[0.0, 0.0]]), "previous": torch.tensor(previous or [[0.0, 0.0]])}
    return SimpleNamespace(trace=SimpleNamespace(logits=torch.tensor(logits)), received="received", previous="previous",
                           batch=SimpleNamespace(x=None, target=torch.tensor(target)), first=torch.tensor(first),
                           forward=lambda model, x: SimpleNamespace(logits=models[model]),
                           spec=SimpleNamespace(classes=len(logits[0])), once=lambda label, compute: compute())


def test_margin_by_hand() -> None:
    """m/τ = 0.2/0.1 = 2 is taken from the true logit: (ln 2 + 2, 0) with label 0 becomes (ln 2, 0), so p_0 = 2/3, loss −ln(2/3).

    A soft label 0.5/0.5 takes 1 from both logits, which changes no probability.
    """
    part = Drift(margin=0.2, tau=0.1, weight=0.0)
    assert float(part.main_loss(view([[LN(2) + 2, 0.0]], [0]))) == pytest.approx(-LN(2 / 3), rel=1e-5)
    want = -(0.5 * LN(2 / 3) + 0.5 * LN(1 / 3))
    assert float(part.main_loss(view([[LN(2), 0.0]], [[0.5, 0.5]]))) == pytest.approx(want, rel=1e-5)
    # 0.75/0.25 takes 1.5 and 0.5: logits (ln 2 + 1 − 1.5, 0 − 0.5) = (ln 2 − 0.5, −0.5), again p = (2/3, 1/3)
    want = -(0.75 * LN(2 / 3) + 0.25 * LN(1 / 3))
    assert float(part.main_loss(view([[LN(2) + 1, 0.0]], [[0.75, 0.25]]))) == pytest.approx(want, rel=1e-5)


def test_drift_label_by_hand() -> None:
    """p_G = (0.5, 0.5), p_P = (0.8, 0.2): D = log p_P − log p_G = (ln 1.6, ln 0.4); ŷ ∝ e^{−D} = (0.625, 2.5), so ŷ = (0.2, 0.8).

    The client drifted towards class 0, so the label points to class 1. With log p = (ln 2/3, ln 1/3) of the model in
    training the term is −0.2 ln(2/3) − 0.8 ln(1/3). At drift temperature ½ the ratios are squared: ŷ ∝ (0.2², 0.8²) = (1/17, 16/17).
    """
    v = view([[LN(2), 0.0]], [0], received=[[LN(0.5), LN(0.5)]], previous=[[LN(0.8), LN(0.2)]])
    part = Drift(margin=0.0)
    assert float(part.loss(v)) == pytest.approx(-0.2 * LN(2 / 3) - 0.8 * LN(1 / 3), rel=1e-5)
    sharp = Drift(margin=0.0, drift_tau=0.5)
    assert float(sharp.loss(v)) == pytest.approx(-(1 * LN(2 / 3) + 16 * LN(1 / 3)) / 17, rel=1e-5)
    assert float(Drift(margin=0.0, weight=0.25).loss(v)) == pytest.approx(0.25 * float(part.loss(v)))


def test_normalisers_of_the_frozen_models_cancel() -> None:
    """Logits may be shifted by any constant: ŷ = softmax(f_G − f_P)."""
    one = view([[1.0, 0.0]], [0], received=[[0.3, -0.2]], previous=[[1.0, 0.4]])
    other = view([[1.0, 0.0]], [0], received=[[7.3, 6.8]], previous=[[-2.0, -2.6]])
    assert float(Drift().loss(one)) == pytest.approx(float(Drift().loss(other)), rel=1e-5)


def test_margin_inside_or_outside_the_regulariser() -> None:
    """ŷ = (½, ½). Margin logits (ln 2 + 2 − 2, 0): p = (2/3, 1/3). Without the margin (ln 2 + 2, 0): p_0 = 2e²/(2e² + 1)."""
    v = view([[LN(2) + 2, 0.0]], [0])
    inside = Drift(margin=0.2, tau=0.1, margin_in_reg=True)
    assert float(inside.loss(v)) == pytest.approx(-0.5 * (LN(2 / 3) + LN(1 / 3)), rel=1e-5)
    p = 2 * math.e**2 / (2 * math.e**2 + 1)
    outside = Drift(margin=0.2, tau=0.1, margin_in_reg=False)
    assert float(outside.loss(v)) == pytest.approx(-0.5 * (LN(p) + LN(1 - p)), rel=1e-5)


def test_first_participation() -> None:
    """skip: no term at all. uniform: labels 1/C, whatever the frozen models say."""
    v = view([[LN(2), 0.0]], [0], received=[[5.0, 0.0]], previous=[[0.0, 5.0]], first=True)
    assert float(Drift(margin=0.0, first="skip").loss(v)) == 0.0
    assert float(Drift(margin=0.0, first="uniform").loss(v)) == pytest.approx(-0.5 * (LN(2 / 3) + LN(1 / 3)), rel=1e-5)


def test_a_margin_in_cosines_needs_the_heads_temperature() -> None:
    """A margin of 0.15 is 0.15/τ on logits that are cosines over τ. With 0.1 for a head's 0.05 it would be 0.15·0.05/0.1 = 0.075."""
    with pytest.raises(RefusedCombination, match=r"tau=0\.1, and the logits of cosine have tau=0\.05"):
        Method([Cosine(tau=0.05), Drift()])
    for parts in ([Cosine(tau=0.05), Drift(tau=0.05)], [Cosine(tau=0.05), Drift(margin=0.0)], [Drift(tau=0.05)]):
        Method(parts)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def frozen_logits(model: Any, x: torch.Tensor, cosine: bool = False) -> np.ndarray:
    """Logits of a frozen model by an ordinary module in evaluation mode."""
    net = tiny_net()
    if cosine:
        net.head = Cosine(tau=0.1).build(net, SimpleNamespace(  # type: ignore[arg-type]
            layout=SimpleNamespace(head="head"), width=12, classes=3)).head
    net.load_state_dict({**model["params"], **model["buffers"]})
    with torch.no_grad():
        return net.eval()(x).numpy().astype(np.float64)


@pytest.mark.parametrize("cosine", [False, True])
def test_whole_objective_in_the_second_round(open_round: Any, cosine: bool) -> None:
    """Eq. 10 as one formula: −mean_b Σ_j (1[j = y] + ŷ_j) log softmax(l)_j; frozen models in evaluation mode, without margin."""
    opened = open_round(Drift(), *([Cosine()] if cosine else []), rounds_before=1)
    opened.step()
    taken = opened.step()                                     # previous, received and current now differ
    slot, x, y = taken.step.slot, taken.batch.x, taken.batch.y.numpy()
    drifted = softmax(frozen_logits(slot.received, x, cosine) - frozen_logits(slot.previous, x, cosine))
    hot = np.eye(3)[y]
    logp = np.log(softmax(taken.trace.logits.detach().numpy().astype(np.float64) - 0.15 / 0.1 * hot))
    want = -((hot + drifted) * logp).sum(1).mean()
    assert float(taken.loss) == pytest.approx(want, rel=1e-4)
    assert abs(drifted - 1 / 3).max() > 1e-3


def test_previous_model_is_the_clients_last_trained_one(open_round: Any) -> None:
    fed = run_tiny([Drift()], rounds=1)
    trained = fed.client(1).tensors["previous"]
    fed.round([0, 3])                                          # client 1 is absent; its previous model stays
    opened = open_round(fed=fed, number=1)
    assert torch.equal(opened.slot.previous["params"]["head.weight"], trained["params"]["head.weight"])
    assert not torch.equal(trained["params"]["head.weight"], fed.model["params"]["head.weight"])


def test_first_round_with_skip_is_the_margin_loss_alone() -> None:
    """And without the margin it is FedAvg; with uniform labels it is not."""
    assert not differences(run_tiny(rounds=1), run_tiny([Drift(margin=0.0)], rounds=1), only=in_model)
    assert differences(run_tiny(rounds=1), run_tiny([Drift(margin=0.0, first="uniform")], rounds=1), only=in_model)
    assert differences(run_tiny(rounds=1), run_tiny([Drift()], rounds=1), only=in_model)


def test_soft_labels_take_the_margin_by_their_weights(open_round: Any) -> None:
    taken = open_round(Drift(), Mixup(alpha=1.0)).step()
    target = taken.batch.target.numpy().astype(np.float64)
    assert ((target > 0.01) & (target < 0.99)).any()
    logits = taken.trace.logits.detach().numpy().astype(np.float64) - 1.5 * target
    assert float(taken.terms["task"]) == pytest.approx(-(target * np.log(softmax(logits))).sum(1).mean(), rel=1e-5)


def test_inference_has_no_margin() -> None:
    fed = run_tiny([Drift()], rounds=1)
    x = fed.samples.x[:6]
    got = fed.look(0, fed.client(0), fed.model, x, False, True).logits
    torch.testing.assert_close(got.double().numpy(), frozen_logits(fed.model, x), rtol=1e-5, atol=1e-6)
