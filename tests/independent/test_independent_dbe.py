"""DBE in plain loops (Alg. 1, eq. 3–9; METHODS 5.1, 5.2): a mean agreed on once by all, a shift of one's own, the running mean."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, LR, SIZES, average, batches, federation, frozen, net, same_model, same_numbers, samples, sgd, shares
from torch import Tensor

from consilience.core.federation import Federation
from consilience.core.part import Phase

KAPPA = 20.0
SETTINGS = {
    "dbe": {},
    "slow mean": {"momentum": 0.3},
    "slow mean, corrected": {"momentum": 0.3, "bias_correct": True},
    "plain MSE": {"half": False},
    "two epochs first": {"init_epochs": 2},
    "no epoch first": {"init_epochs": 0},
    "as the release takes the mean": {"init_mean": "running", "momentum": 0.3},
    "mr alone": {},
    "prbm alone": {},
}


@pytest.mark.parametrize(("row", "norm"), [*((row, True) for row in SETTINGS), ("dbe", False)])
def test_dbe(row: str, norm: bool) -> None:
    how = SETTINGS[row]
    has_mr, has_shift = row != "prbm alone", row != "mr alone"
    mr = "mr(" + ", ".join([f"kappa={KAPPA}", *(f"{k}={str(v).lower()}" for k, v in how.items())]) + ")"
    fed = federation("+".join([mr] * has_mr + ["prbm"] * has_shift), norm)
    momentum, half = how.get("momentum", 1.0), 0.5 if how.get("half", True) else 1.0
    server = net(norm)
    g = torch.zeros(7)
    if has_mr:
        for i in range(len(SIZES)):                                                  # Alg. 1, lines 1–3: all N clients, without DBE
            local, running = copy.deepcopy(server), torch.zeros(7)
            optimiser = sgd(local.parameters())
            for x, y in first_epochs(fed, i, how.get("init_epochs", 1)):
                z = local.features(x)
                running = (1 - momentum) * running + momentum * z.detach().mean(0)
                optimiser.zero_grad()
                F.cross_entropy(local.head(z), y).backward()
                optimiser.step()
            mean = running if how.get("init_mean") == "running" else frozen(local).features(samples(fed, i)[0]).mean(0)
            g = g + SIZES[i] / sum(SIZES) * mean
    shift = {i: torch.zeros(7, requires_grad=True) for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, r = copy.deepcopy(server), torch.zeros(7)                         # r begins at 0 in every round
            optimiser, own = sgd(local.parameters()), torch.optim.SGD([shift[i]], LR)
            for step, (x, y) in enumerate(batches(fed, i, t), start=1):
                z = local.features(x)
                loss = F.cross_entropy(local.head(z + shift[i] if has_shift else z), y)                     # eq. 3
                r = (1 - momentum) * r.detach() + momentum * z.mean(0)                                      # eq. 9
                if has_mr:
                    seen = r / (1 - (1 - momentum) ** step) if how.get("bias_correct") else r
                    loss = loss + KAPPA * half * (seen - g).square().mean()                                 # eq. 8
                optimiser.zero_grad()
                own.zero_grad()
                loss.backward()
                optimiser.step()
                if has_shift:
                    own.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))                     # lines 12–14
        fed.round(cohort)
        same_model(fed.model, server)
        if has_mr:
            same_numbers(fed.shared["mr"], {"mean": g})
        for i in range(len(SIZES)):
            if has_shift:
                same_numbers(fed.client(i).tensors["personal"]["prbm"], {"shift": shift[i].detach()})


@pytest.mark.parametrize("at", ["stage1", "neck"])
def test_any_point_of_the_model(at: str) -> None:
    """Table 1: the shift and the mean of a map have an entry for every position."""
    fed = federation(f"mr(kappa={KAPPA}, momentum=0.6, at={at})+prbm(at={at})")
    fed.prepare()
    server, g = net(), fed.shared["mr"]["mean"]
    shift = {i: torch.zeros_like(g).requires_grad_() for i in range(len(SIZES))}
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local, r, loss = copy.deepcopy(server), torch.zeros_like(g), torch.zeros(())
            optimiser, own = sgd(local.parameters()), torch.optim.SGD([shift[i]], LR)
            for x, y in batches(fed, i, t):
                h = x
                for name in ("stage1", "stage2", "neck", "header"):
                    h = getattr(local, name)(h)
                    if name == at:
                        r = 0.4 * r.detach() + 0.6 * h.mean(0)
                        loss, h = KAPPA / 2 * (r - g).square().mean(), h + shift[i]
                optimiser.zero_grad()
                own.zero_grad()
                (loss + F.cross_entropy(local.head(h), y)).backward()
                optimiser.step()
                own.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort)))
        fed.round(cohort)
        same_model(fed.model, server)
        for i in range(len(SIZES)):
            same_numbers(fed.client(i).tensors["personal"]["prbm"], {"shift": shift[i].detach()})


def first_epochs(fed: Federation, client: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
    return batches(fed, client, 0, [Phase(fed.plain_phase.name, (), epochs=epochs)]) if epochs else []
