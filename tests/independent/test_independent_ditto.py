"""Ditto in plain loops (METHODS 7.26): FedAvg beside v ← v − η(∇ℓ(v) + λ(v − wᵗ)), pulled to the model received in the round."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, sgd, shares, weights_of


def test_ditto() -> None:
    weight, epochs = 0.5, 3
    fed = federation(f"ditto(weight={weight}, epochs={epochs})")
    main, second = fed.phases
    server = net()
    own = {i: net() for i in range(len(SIZES))}                                      # v_i begins as the initial model
    for t, cohort in enumerate(COHORTS, start=1):
        trained, start = {}, weights_of(server)
        for i in cohort:
            local, v = copy.deepcopy(server), own[i]
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t, [main]):
                optimiser.zero_grad()
                F.cross_entropy(local(x), y).backward()
                optimiser.step()
            optimiser = sgd(v.parameters())
            assert len(batches(fed, i, t, [second])) == epochs * -(-SIZES[i] // 8)
            for x, y in batches(fed, i, t, [second]):
                loss = F.cross_entropy(v(x), y) + weight / 2 * sum((p - start[k]).square().sum() for k, p in v.named_parameters())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):
            same_model(fed.personal_model(i)[0], own[i])
