"""What the plain loops of this directory share: a small problem, the batches a run draws, and a comparison of numbers.

Every test here writes one method's rounds as an ordinary loop over clients and batches, from the papers' equations and torch alone. It
takes from the package the draws of chance only: batch orders, initial values of attached modules, noise. The cohorts, the sizes and the
labels are unkind on purpose: clients differ in size, epochs end with smaller batches, classes are missing, and client 3 comes late.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.part import Model, Phase
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.engines.sequential import Sequential
from consilience.parts.stack import parse_stack

SIZES = (19, 26, 11, 8)                          # with batches of 8, in an epoch: 8 8 3 | 8 8 8 2 | 8 3 | 8
OWNED = ((0, 1, 2), (0, 1, 2, 3), (1, 3), (0, 1))                # client 3 has two of the four classes
COHORTS = ([0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3])
CLASSES, LR, RHO, DECAY = 4, 0.05, 0.9, 1e-2
LAYOUT = Layout(head="head", stages=("stage1", "stage2"), extractor=("stage1", "stage2", "neck"), header=("header",))


class Net(nn.Module):
    """Two convolution stages with or without BatchNorm, a neck, a header and a head."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        layer = (lambda n: nn.BatchNorm2d(n)) if norm else (lambda n: nn.Identity())
        self.stage1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer(4), nn.ReLU(), nn.AvgPool2d(2))
        self.stage2 = nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), layer(5), nn.ReLU(), nn.AvgPool2d(2))
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(20, 9), nn.ReLU())
        self.header = nn.Linear(9, 7)
        self.head = nn.Linear(7, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.header(self.neck(self.stage2(self.stage1(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def net(norm: bool = True) -> Net:
    """The same initial model in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net(norm)


def unchanged(x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, y


def federation(method: str, norm: bool = True, classes: tuple[tuple[int, ...], ...] = OWNED, **policy: Any) -> Federation:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(SIZES), 1, 8, 8, generator=generator)
    y = torch.cat([torch.tensor(own)[torch.randint(len(own), (n,), generator=generator)] for n, own in zip(SIZES, classes)])
    x += 0.4 * y[:, None, None, None] + torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))[:, None, None, None] * 0.2
    proxy = torch.randn(20, 1, 8, 8, generator=generator)
    people = Population(x, y, tuple(torch.arange(len(x)).split(list(SIZES))), CLASSES, unchanged, proxy=proxy)
    how = {"lr": LR, "momentum": RHO, "weight_decay": DECAY, "batch": 8, "epochs": 2, "last_batch": "keep"} | policy
    return Federation(net(norm), LAYOUT, parse_stack(method).method(), people, Policy(**how), Sequential)


def sgd(params: Iterable[Tensor], momentum: float = RHO, decay: float = DECAY) -> torch.optim.SGD:
    """The clients' optimiser, new in every round."""
    return torch.optim.SGD(params, LR, momentum=momentum, weight_decay=decay)


def batches(fed: Federation, client: int, round_number: int, phases: list[Phase] | None = None) -> list[tuple[Tensor, Tensor]]:
    """Samples and labels of a client's steps, in the order the run draws."""
    schedule = fed.samples.schedule(client, phases or fed.phases)
    sizes = [n for _, some in schedule for n in some]
    rows = fed.samples.order(client, round_number, schedule)
    return [(fed.samples.x[r[:n]], fed.samples.y[r[:n]]) for r, n in zip(rows, sizes)]


def samples(fed: Federation, client: int) -> tuple[Tensor, Tensor]:
    """All that a client trains on."""
    rows = fed.samples.rows[client].train
    return fed.samples.x[rows], fed.samples.y[rows]


def shares(clients: Iterable[int], uniform: bool = False) -> dict[int, float]:
    weight = {i: 1.0 if uniform else float(SIZES[i]) for i in clients}
    return {i: w / sum(weight.values()) for i, w in weight.items()}


def average(states: Mapping[int, Mapping[str, Tensor]], share: Mapping[int, float]) -> dict[str, Tensor]:
    """Σ p_k w_k over clients; of counters the largest."""
    first = next(iter(states.values()))
    return {k: torch.stack([share[i] * s[k] for i, s in states.items()]).sum(0) if v.is_floating_point()
            else torch.stack([s[k] for s in states.values()]).amax(0) for k, v in first.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in module.named_parameters()}


def frozen(module: nn.Module) -> Any:
    """A copy that is only looked at: eval mode, no gradients."""
    return copy.deepcopy(module).eval().requires_grad_(False)


def attached(fed: Federation, part: str, like: nn.Module) -> nn.Module:
    """A module with the initial values that the run has drawn for what a part attaches, matched by their order."""
    values = [v for k, v in fed.model["params"].items() if k.startswith(part + ".")]
    mine = list(like.parameters())
    assert [v.shape for v in values] == [p.shape for p in mine]
    for p, v in zip(mine, values):
        p.data.copy_(v)
    return like


def same_numbers(ours: Mapping[str, Any], theirs: Mapping[str, Tensor], within: float = 1e-9) -> None:
    """Every tensor of theirs, by name, in ours."""
    assert theirs
    for k, v in theirs.items():
        torch.testing.assert_close(ours[k].to(v.dtype), v, rtol=0, atol=within, msg=lambda m, k=k: f"{k}: {m}")


def same_model(ours: Model | Any, module: nn.Module, within: float = 1e-9) -> None:
    """Parameters and statistics of an ordinary module, all of them."""
    same_numbers({**ours["params"], **ours["buffers"]}, module.state_dict(), within)


def recorded(monkeypatch: Any, owner: Any, name: str) -> list[Any]:
    """What every later call of a function of the package returns, in order: a run's draws, for a loop that needs the same."""
    real, out = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        out.append(real(*args, **kwargs))
        return out[-1]
    monkeypatch.setattr(owner, name, call)
    return out
