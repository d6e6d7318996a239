"""FedBABU in plain loops (METHODS 7.30): a head that neither learns nor decays; fine-tuning from the global model before use."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, sgd, shares

from consilience.core.part import Phase


@pytest.mark.parametrize("tuned", ["whole", "head"])
def test_fedbabu(tuned: str) -> None:
    fine_tune = 3
    fed = federation(f"fedbabu(fine_tune={fine_tune}, tuned={tuned})")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd([p for k, p in local.named_parameters() if not k.startswith("head.")])
            for x, y in batches(fed, i, t):
                local.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
    for i in range(len(SIZES)):
        own = copy.deepcopy(server)
        optimiser = sgd(own.parameters() if tuned == "whole" else own.head.parameters())
        for x, y in batches(fed, i, len(COHORTS), [Phase(fed.plain_phase.name, (), epochs=fine_tune)]):
            own.zero_grad()
            F.cross_entropy(own(x), y).backward()
            optimiser.step()
        same_model(fed.personal_model(i)[0], own)
