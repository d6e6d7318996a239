"""LfD's constraint study: which region is tied, and how strongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from consilience.errors import ConfigError
from consilience.parts.constraint import Constraint
from consilience.parts.local import Local
from consilience.parts.per import Per
from consilience.testing import tiny_federation, tiny_net

REGIONS = ("extractor", "header", "head", "all")
VARIANTS = [{"on": on, "region": region} for on in ("feature", "parameter") for region in REGIONS]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Constraint(**settings))


def region_of(key: str) -> str:
    """TinyNet's regions, written out."""
    return {"stage1": "extractor", "neck": "extractor", "header": "header", "head": "head"}[key.split(".")[0]]


@pytest.mark.parametrize("region", REGIONS)
def test_parameter_constraint_pulls_its_region_only(open_round: Any, region: str) -> None:
    """+ (λ/2)‖w − wᵗ‖² adds λ(w − wᵗ) to the gradient of the region and nothing elsewhere; both take the same first step,
    where w = wᵗ, so in the second step only the pull differs.
    """
    tied, free = open_round(Constraint(weight=0.4, on="parameter", region=region)), open_round()
    first = tied.step()
    assert float(first.terms["constraint"]) == 0.0
    free.step()
    mine, plain = tied.step(), free.step()
    moved = {k: (w - mine.step.slot.received["params"][k]).detach() for k, w in mine.before["model"]["params"].items()}
    inside = {k for k in moved if region in ("all", region_of(k))}
    assert float(mine.terms["constraint"]) == pytest.approx(0.2 * sum(float(moved[k].square().sum()) for k in inside), rel=1e-4)
    for k in moved:
        want = plain.grads[k] + (0.4 * moved[k] if k in inside else 0)
        torch.testing.assert_close(mine.grads[k], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("region", REGIONS)
def test_feature_constraint_is_the_mean_squared_error_of_its_outputs(open_round: Any, region: str) -> None:
    """Outputs of the model in training against those of the received one in evaluation mode, on the same batch."""
    opened = open_round(Constraint(weight=0.3, region=region))
    opened.step()
    taken = opened.step()
    x, received = taken.batch.x, taken.step.slot.received
    fixed, net = {}, tiny_net().eval()
    net.load_state_dict({**received["params"], **received["buffers"]})
    with torch.no_grad():
        fixed["extractor"] = net.neck(net.stage1(x))  # type: ignore[operator]
        fixed["header"] = net.header(fixed["extractor"])  # type: ignore[operator]
        fixed["head"] = net.head(fixed["header"])  # type: ignore[operator]
    mine = {"extractor": taken.trace.before["neck"], "header": taken.trace.before["head:input"], "head": taken.trace.logits}
    regions = ("extractor", "header", "head") if region == "all" else (region,)
    want = sum(0.3 * np.mean((mine[r].detach().numpy() - fixed[r].numpy()) ** 2) for r in regions)
    assert float(taken.terms["constraint"]) == pytest.approx(float(want), rel=1e-4)


@pytest.mark.parametrize(("region", "untouched"), [("extractor", {"header", "head"}), ("header", {"head"}), ("head", set())])
def test_feature_constraint_moves_what_lies_before_it(open_round: Any, region: str, untouched: set[str]) -> None:
    mine, plain = open_round(Constraint(weight=3.0, region=region)).step(), open_round().step()
    for k in mine.grads:
        same = torch.allclose(mine.grads[k], plain.grads[k], rtol=1e-5, atol=1e-7)
        if region_of(k) in untouched:
            assert same, k
        elif k.endswith("weight") and region_of(k) == region:
            assert not same, k


def test_a_region_that_does_not_travel_cannot_be_tied() -> None:
    """FedPer's head is received as the client trained it, and only what travels is pulled: the term would be nothing."""
    with pytest.raises(ConfigError, match=r"parameter of head trains and travels. Use on=feature, or region=extractor, or region=header.$"):
        tiny_federation([Constraint(on="parameter"), Per()])
    with pytest.raises(ConfigError, match=r"no parameter of head trains and travels. Use on=feature.$"):
        tiny_federation([Constraint(on="parameter"), Local()])
    with pytest.raises(ConfigError, match=r"has on=parameter, and no parameter trains and travels. Use on=feature.$"):
        tiny_federation([Constraint(on="parameter", region="all"), Local()])
    tiny_federation([Constraint(on="parameter", region="extractor"), Per()])
    tiny_federation([Constraint(), Per()])
