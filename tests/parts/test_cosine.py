"""LfD's cosine classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from consilience.errors import ConfigError
from consilience.parts.cosine import Cosine, CosineHead
from consilience.parts.drift import Drift
from consilience.runs.config import RunConfig
from consilience.testing import run_tiny, tiny_federation


@pytest.mark.parametrize("settings", [{"tau": 0.05}, {"tau": 0.1}, {"tau": 1.0}, {"init": "linear"}], ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Cosine(**settings))


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def test_first_rows_are_normal_or_those_of_a_linear_layer() -> None:
    """Normal with variance 1/d: squared length d·1/d = 1. Uniform in ±1/√d has variance 1/(3d): squared length 1/3."""
    normal, linear = (seeded(lambda init=init: CosineHead(400, 50, 0.1, init).weight.detach()) for init in ("normal", "linear"))
    assert torch.equal(normal, seeded(lambda: torch.randn(50, 400) / 400**0.5))
    assert torch.equal(normal, seeded(lambda: CosineHead(400, 50, 0.1).weight.detach()))
    assert torch.equal(linear, seeded(lambda: nn.Linear(400, 50).weight.detach()))
    assert linear.abs().max() <= 1 / 20                         # 1/√400
    assert normal.square().sum(1).mean().item() == pytest.approx(1.0, abs=0.05)
    assert linear.square().sum(1).mean().item() == pytest.approx(1 / 3, abs=0.02)


def test_first_rows_are_a_setting_that_keeps_stored_names() -> None:
    digests = [RunConfig.make({"method": "lfd", "settings": s}).digest() for s in ({}, {"lfd.init": "normal"}, {"cosine.init": "linear"})]
    assert digests[0] == digests[1] != digests[2]
    heads = {init: tiny_federation([Cosine(init=init)]).model["params"]["head.weight"] for init in ("normal", "linear")}
    assert heads["linear"].abs().max() <= 1 / 12**0.5 < heads["normal"].abs().max()
    assert torch.equal(tiny_federation([Cosine()]).model["params"]["head.weight"], heads["normal"])
    with pytest.raises(ConfigError, match=r"must be one of normal, linear\. Got 'liner' instead\. Did you mean 'linear'"):
        Cosine(init="liner")


def test_logits_by_hand() -> None:
    """u = (3, 4) → (0.6, 0.8); W = (2, 0), (0, −5), (1, 1). Cosines 0.6, −0.8 and 1.4/√2 = 0.98995; over τ = 0.1 ten times that."""
    head = CosineHead(2, 3, 0.1)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, -5.0], [1.0, 1.0]]))
    got = head(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(got, torch.tensor([[6.0, -8.0, 9.8995]]), rtol=1e-4, atol=1e-4)


def test_lengths_do_not_matter() -> None:
    head = CosineHead(4, 3, 0.1)
    u = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    before = head(u)
    with torch.no_grad():
        head.weight.mul_(torch.tensor([[2.0], [0.1], [30.0]]))
    torch.testing.assert_close(head(7 * u), before)
    assert before.abs().max() <= 10 + 1e-4                       # cosines over τ


def test_head_is_replaced_without_bias_and_travels() -> None:
    fed = tiny_federation([Cosine()])
    assert "head.bias" not in fed.model["params"]
    assert fed.model["params"]["head.weight"].shape == (3, 12)
    assert "head.weight" in fed.spec.shared
    assert fed.spec.features == "head:input"


def test_served_model_scores_cosines_without_margin() -> None:
    """Inference logits are c_j/τ exactly, after training with a margin."""
    fed = run_tiny([Cosine(tau=0.1), Drift(tau=0.1, margin=0.15)])
    trace = fed.look(0, fed.client(0), fed.model, fed.samples.x[:6], False, True)
    u, w = trace.before["head:input"].double().numpy(), fed.model["params"]["head.weight"].double().numpy()
    cosines = (u / np.linalg.norm(u, axis=1, keepdims=True)) @ (w / np.linalg.norm(w, axis=1, keepdims=True)).T
    np.testing.assert_allclose(trace.logits.numpy(), cosines / 0.1, rtol=1e-4, atol=1e-4)


def test_frozen_forwards_use_the_cosine_head_too(open_round: Any) -> None:
    """Surgery, not a tap: reference passes without taps show cosines over τ, within ±10."""
    opened = open_round(Cosine(), Drift(), rounds_before=1)
    taken = opened.step()
    for model in (taken.step.slot.received, taken.step.slot.previous):
        trace = opened.fed.program.network.forward(model, taken.batch.x)
        u, w = trace.before["head:input"].detach(), model["params"]["head.weight"].detach()
        want = torch.nn.functional.cosine_similarity(u[:, None], w[None], dim=2) / 0.1
        torch.testing.assert_close(trace.logits.detach(), want, rtol=1e-4, atol=1e-4)
