"""GroupDRO in plain loops (METHODS 7.10): q_i ← q_i exp(η ℓ_i) each round, weights q_i/Σ_S q; q belongs to the client's number."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, net, same_model, same_numbers, sgd, shares


@pytest.mark.parametrize("loss_of", ["round", "first"])
def test_groupdro(loss_of: str) -> None:
    eta = 0.5
    fed = federation(f"groupdro(eta={eta}, loss_of={loss_of})")
    server, q = net(), torch.ones(len(SIZES))
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, losses = copy.deepcopy(server), []
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                optimiser.zero_grad()
                loss = F.cross_entropy(local(x), y)
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            q[i] *= torch.tensor(eta * (losses[0] if loss_of == "first" else sum(losses) / len(losses))).exp()
            trained[i] = local.state_dict()
        weight = {i: (q[i] / q[cohort].sum()).item() for i in cohort}
        by_loss, plain = average(trained, weight), average(trained, shares(cohort, uniform=True))
        server.load_state_dict({**plain, **{k: by_loss[k] for k, _ in server.named_parameters()}})    # statistics as the run says
        fed.round(cohort)
        same_model(fed.model, server)
        same_numbers({"q": fed.server["dro"]["q"] / fed.server["dro"]["q"].sum()}, {"q": q / q.sum()})
