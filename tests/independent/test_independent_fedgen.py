"""FedGen in plain loops, in the form DBE compares with (METHODS 7.23): a generator trained on the server against the clients' heads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import CLASSES, COHORTS, SIZES, average, batches, federation, net, recorded, same_model, samples, sgd, shares
from torch import Tensor, nn

from consilience import rng

NOISE, HIDDEN, STEPS = 3, 5, 4


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(NOISE + CLASSES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 7)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:                           # [ε ‖ onehot y] → h → BN → ReLU → d
        return self.last(F.relu(self.norm(self.first(torch.cat([noise, F.one_hot(y, CLASSES)], 1)))))


def test_fedgen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 0.7
    fed = federation(f"fedgen(weight={weight}, noise={NOISE}, hidden={HIDDEN}, steps={STEPS})")
    generator = Generator()
    for p, v in zip(generator.parameters(), fed.shared["gen"]["generator"].values(), strict=False):
        p.data.copy_(v)
    adam = torch.optim.Adam(generator.parameters(), 0.005)                           # one for the whole run
    counts = torch.bincount(torch.cat([samples(fed, i)[1] for i in range(len(SIZES))]), minlength=CLASSES)
    until = counts.cumsum(0) / counts.sum()
    uniforms = recorded(monkeypatch, rng, "uniform")
    server = net()
    for t, cohort in enumerate(COHORTS, start=1):
        uniforms.clear()
        fed.round(cohort)
        drawn = iter([u for u in uniforms if u.dim()])

        def draw(drawn=drawn) -> tuple[Tensor, Tensor]:
            label = next(drawn)
            return next(drawn), torch.searchsorted(until, label)                     # a label as often as clients have it
        trained, heads = {}, {}
        for i in cohort:
            local, told = copy.deepcopy(server), copy.deepcopy(generator).requires_grad_(False)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                noise, other = draw()
                assert len(other) == len(y)
                loss = F.cross_entropy(local(x), y) + weight * F.cross_entropy(local.head(told(noise, other)), other)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained[i], heads[i] = local.state_dict(), copy.deepcopy(local.head).requires_grad_(False)
        p = shares(cohort)
        server.load_state_dict(average(trained, p))
        for _ in range(STEPS):
            noise, y = draw()
            made = generator(noise, y)
            adam.zero_grad()
            F.cross_entropy(sum(p[i] * heads[i](made) for i in cohort), y).backward()
            adam.step()
        assert next(drawn, None) is None
        same_model(fed.model, server)
        ours = list(fed.shared["gen"]["generator"].values())
        for a, b in zip(ours, generator.parameters(), strict=False):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-9)
