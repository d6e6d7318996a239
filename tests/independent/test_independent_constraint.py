"""LfD's constraint study (Table 1; METHODS 2.5) in plain loops: features or parameters of a region kept near the received model's."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, average, batches, federation, frozen, net, same_model, sgd, shares, weights_of


@pytest.mark.parametrize("on", ["feature", "parameter"])
@pytest.mark.parametrize("region", ["extractor", "header", "head", "all"])
def test_constraint(region: str, on: str) -> None:
    weight = 0.8
    fed = federation(f"constraint(on={on}, region={region}, weight={weight})")
    regions = ("extractor", "header", "head") if region == "all" else (region,)
    server = net()
    for t, cohort in enumerate(COHORTS[:3], start=1):
        start, look, trained = weights_of(server), frozen(server), {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                def outputs(m, x=x):
                    e = m.neck(m.stage2(m.stage1(x)))
                    return {"extractor": e, "header": m.header(e), "head": m.head(m.header(e))}
                now, then = outputs(local), outputs(look)
                loss = F.cross_entropy(now["head"], y)
                for r in regions:
                    if on == "feature":
                        loss = loss + weight * F.mse_loss(now[r], then[r])           # mean over all elements
                    else:
                        mine = {"head": ("head.",), "header": ("header.",), "extractor": ("stage", "neck")}[r]
                        apart = [(p - start[k]).square().sum() for k, p in local.named_parameters() if k.startswith(mine)]
                        loss = loss + weight / 2 * sum(apart)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
