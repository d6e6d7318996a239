"""Federated averaging as anybody would write it: nn.Module, backward, torch.optim, a loop over state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.testing import TinyNet

Corrected = Callable[[int, nn.Module, dict[str, Tensor]], None]     # client, net, received: may change the gradients


def no_term(net: nn.Module, received: dict[str, Tensor]) -> Any:
    return 0.0


class PlainLoop:
    """Trains beside a federation on the same batches. `make` gives a fresh optimiser for a client's parameters."""

    def __init__(self, fed: Federation, make: Callable[..., torch.optim.Optimizer], *, by_samples: bool = False, keep: bool = False,
                 lr: Callable[[int], float] = lambda r: 0.05, net: Callable[[], nn.Module] = TinyNet) -> None:
        self.fed, self.make, self.by_samples, self.keep, self.lr, self.net = fed, make, by_samples, keep, lr, net
        self.server = net()
        self.server.load_state_dict({k: v.clone() for half in fed.model.values() for k, v in half.items()})
        self.optimisers: dict[int, Any] = {}
        self.rounds = 0

    def batches(self, number: int) -> list[Tensor]:
        schedule = self.fed.samples.schedule(number, self.fed.phases)
        sizes = [n for _, s in schedule for n in s]
        return [rows[:n] for rows, n in zip(self.fed.samples.order(number, self.rounds, schedule), sizes)]

    def round(self, cohort: list[int], term: Callable[..., Any] = no_term, correct: Corrected = lambda i, net, w: None,
              ended: Corrected = lambda i, net, w: None) -> dict[int, list[float]]:
        """One round of clients that can fill a batch. Returns each client's losses."""
        self.rounds += 1
        received = {k: p.detach().clone() for k, p in self.server.named_parameters()}
        trained, sizes, losses = [], [], {}
        for i in cohort:
            net = self.net()
            net.load_state_dict(self.server.state_dict())
            optimiser = self.make(net.parameters(), lr=self.lr(self.rounds))
            if self.keep and i in self.optimisers:
                optimiser.load_state_dict(self.optimisers[i])
                for group in optimiser.param_groups:
                    group["lr"] = self.lr(self.rounds)
            losses[i] = []
            for rows in self.batches(i):
                optimiser.zero_grad()
                loss = F.cross_entropy(net(self.fed.samples.x[rows]), self.fed.samples.y[rows]) + term(net, received)
                loss.backward()
                correct(i, net, received)
                optimiser.step()
                losses[i].append(loss.item())
            self.optimisers[i] = optimiser.state_dict()
            ended(i, net, received)
            trained.append(net.state_dict())
            sizes.append(len(self.fed.samples.rows[i].train) if self.by_samples else 1)
        p = [n / sum(sizes) for n in sizes]
        self.server.load_state_dict({k: sum(w * t[k] for w, t in zip(p, trained)) if v.is_floating_point() else
                                     max(t[k] for t in trained) for k, v in self.server.state_dict().items()})
        return losses

    def distance(self) -> float:
        """Largest difference between the federation's model and this one's."""
        flat = {k: v for half in self.fed.model.values() for k, v in half.items()}
        own = self.server.state_dict()
        assert flat.keys() == own.keys()
        return max((flat[k].double() - own[k].double()).abs().max().item() for k in flat)
