"""HarmoFL in plain loops (METHODS 7.19): the clients' mean amplitude at low frequencies, once; then SAM's step on such images."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import COHORTS, SIZES, average, batches, federation, frozen, net, same_model, samples, sgd, shares
from torch import Tensor


@pytest.mark.parametrize(("low", "alpha"), [(0.0, 0.05), (0.13, 0.3), (0.5, 0.3)])
def test_harmofl(low: float, alpha: float) -> None:
    fed = federation(f"harmofl(low={low}, alpha={alpha})")
    server, most = net(), int(low * 8)
    block = slice(max(4 - most, 0), 5 + most)                                        # around the middle of the shifted spectrum

    def sizes(x: Tensor) -> Tensor:
        return torch.fft.fftshift(torch.fft.fft2(x).abs(), dim=(-2, -1))

    wanted = torch.stack([sizes(samples(fed, i)[0]).mean(0) for i in range(len(SIZES))]).mean(0)      # every client counts the same

    def normalised(x: Tensor) -> Tensor:
        size = sizes(x)
        size[..., block, block] = wanted[..., block, block]
        return torch.fft.ifft2(torch.polar(torch.fft.ifftshift(size, dim=(-2, -1)), torch.fft.fft2(x).angle())).real
    for t, cohort in enumerate(COHORTS, start=1):
        trained = {}
        for i in cohort:
            local = copy.deepcopy(server)
            optimiser = sgd(local.parameters())
            for x, y in batches(fed, i, t):
                x = normalised(x)
                g1 = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
                size = torch.sqrt(sum(g.square().sum() for g in g1)) + 1e-12
                moved = copy.deepcopy(local)                                         # its statistics are thrown away
                with torch.no_grad():
                    for p, g in zip(moved.parameters(), g1):
                        p += alpha * g / size
                g2 = torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters()))
                for p, g in zip(local.parameters(), g2):
                    p.grad = g
                optimiser.step()
            trained[i] = local.state_dict()
        server.load_state_dict(average(trained, shares(cohort, uniform=True)))
        fed.round(cohort)
        same_model(fed.model, server)
        x = samples(fed, 2)[0]
        asked = fed.look(2, fed.client(2), fed.model, x, False, False).logits        # evaluation sees such images too
        torch.testing.assert_close(asked, frozen(server)(normalised(x)), rtol=0, atol=1e-9)
