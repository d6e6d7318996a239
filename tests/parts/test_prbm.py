"""DBE's personal bias vector: how it trains, where it stays, and what it changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from consilience import tree
from consilience.parts.mr import Mr
from consilience.parts.prbm import Prbm
from consilience.parts.scaffold import Scaffold
from consilience.testing import run_tiny, tiny_federation

VARIANTS = [{}, {"at": "neck"}, {"at": "stage1"}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Prbm(**settings))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_trained_by_plain_sgd_whatever_the_run_uses(open_round: Any) -> None:
    """z = z_g + p, logits = W z + b, so ∂CE/∂p = Σ_b (softmax − one-hot)_b W / B. Each step: p ← p − η·that; no momentum, no decay,
    although the model's own optimiser has both.
    """
    opened = open_round(Prbm(), momentum=0.9, weight_decay=0.1, lr=0.05)
    shift = np.zeros(12)
    for taken in opened.rest():
        logits = taken.trace.logits.detach().numpy().astype(np.float64)
        w = taken.before["model"]["params"]["head.weight"].numpy().astype(np.float64)
        shift = shift - 0.05 * ((softmax(logits) - np.eye(3)[taken.batch.y.numpy()]) @ w).mean(0)
        np.testing.assert_allclose(taken.after["personal"]["prbm"]["shift"].numpy(), shift, rtol=1e-3, atol=1e-6)
    assert abs(shift).max() > 1e-3


def test_the_model_sees_the_shifted_features(open_round: Any) -> None:
    opened = open_round(Prbm())
    opened.step()
    taken = opened.step()
    shift = taken.before["personal"]["prbm"]["shift"]
    z_g, z = (t["head:input"].detach() for t in (taken.trace.before, taken.trace.after))
    torch.testing.assert_close(z, z_g + shift)
    p = taken.before["model"]["params"]
    torch.testing.assert_close(taken.trace.logits.detach(), z @ p["head.weight"].T + p["head.bias"])


def test_starts_at_zero_and_stays_with_the_client() -> None:
    fed = tiny_federation([Prbm()])
    fed.round([0, 1])
    shifts = [fed.client(i).tensors["personal"]["prbm"]["shift"].clone() for i in range(4)]
    assert torch.equal(shifts[3], torch.zeros(12))                       # never took part
    assert not torch.equal(shifts[0], shifts[1])
    fed.round([1, 3])
    assert torch.equal(fed.client(0).tensors["personal"]["prbm"]["shift"], shifts[0])
    assert not torch.equal(fed.client(1).tensors["personal"]["prbm"]["shift"], shifts[1])


def test_never_sent() -> None:
    """Bytes up and down are FedAvg's; nothing of it is on the server."""
    plain, own = tiny_federation(), tiny_federation([Prbm()])
    for _ in range(2):
        a, b = plain.round(), own.round()
        assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    assert not any("prbm" in path for path, _ in tree.paths({"m": own.model, "s": own.shared, "v": own.server}))


def test_personal_and_global_evaluation_differ_by_the_shift() -> None:
    fed = run_tiny([Prbm()])
    x = fed.samples.x[:5]
    model, taps = fed.personal_model(0)
    assert taps
    mine = fed.look(0, fed.client(0), model, x, False, True)
    everyone = fed.look(0, fed.client(0), fed.model, x, False, False)
    shift, w = fed.client(0).tensors["personal"]["prbm"]["shift"], fed.model["params"]["head.weight"]
    torch.testing.assert_close(mine.logits - everyone.logits, (shift @ w.T).expand(5, 3), rtol=1e-3, atol=1e-5)
    assert (mine.logits - everyone.logits).abs().max() > 1e-3
    other = fed.look(1, fed.client(1), model, x, False, True)
    assert not torch.equal(mine.logits, other.logits)
    assert fed.personal


@pytest.mark.parametrize(("at", "shape"), [("stage1", (4, 4, 4)), ("neck", (12,))])
def test_any_point_of_the_model(open_round: Any, at: str, shape: tuple[int, ...]) -> None:
    """The shift has the shape of one sample there; its gradient is the sum over the batch of the gradient that enters the next layer."""
    opened = open_round(Prbm(at=at))
    opened.step()
    taken = opened.step()
    shift = taken.before["personal"]["prbm"]["shift"]
    assert tuple(shift.shape) == shape
    torch.testing.assert_close(taken.trace.after[at].detach(), taken.trace.before[at].detach() + shift)
    assert "head:input" in taken.trace.before
    assert torch.equal(taken.trace.before["head:input"], taken.trace.after["head:input"])
    torch.testing.assert_close(taken.after["personal"]["prbm"]["shift"], shift - 0.1 * taken.own_grads[0])


def test_corrections_leave_the_shift_alone(open_round: Any) -> None:
    """SCAFFOLD's variates cover what travels; the shift's step is uncorrected (METHODS.md 10.1)."""
    opened = open_round(Scaffold(), Prbm(), Mr(), rounds_before=1)
    assert not any("shift" in k for k in opened.fed.shared["scaffold"]["c"])
    taken = opened.step()
    moved = taken.after["personal"]["prbm"]["shift"] - taken.before["personal"]["prbm"]["shift"]
    torch.testing.assert_close(moved, -0.1 * taken.own_grads[0])
