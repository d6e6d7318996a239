"""One step of one client against an ordinary module, backward and subtraction; nothing of ours in the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from consilience.core.federation import Federation
from consilience.core.part import Model
from consilience.testing import TinyNet

ONE = {"steps": 1, "momentum": 0.0, "weight_decay": 0.0}      # settings under which a round is one step


def plain_net(model: Model, train: bool = True) -> TinyNet:
    """An ordinary module with a model's values; keys that parts attached are left out."""
    net = TinyNet()
    known = net.state_dict()
    net.load_state_dict({k: v.clone() for half in model.values() for k, v in half.items() if k in known}, strict=False)
    return net.train(train)


def features(net: TinyNet, x: Tensor) -> Tensor:
    return net.header(net.neck(net.stage1(x)))


def next_batch(fed: Federation, number: int) -> tuple[Tensor, Tensor]:
    """The samples of a client's first step of the coming round."""
    schedule = fed.samples.schedule(number, fed.phases)
    rows = fed.samples.order(number, fed.round_number + 1, schedule)[0][: schedule[0][1][0]]
    return fed.samples.x[rows], fed.samples.y[rows]


def check_step(fed: Federation, number: int, term: Callable[[TinyNet, Tensor, Tensor], Any] = lambda net, x, y: 0.0,
               task: Callable[[TinyNet, Tensor, Tensor], Tensor] = lambda net, x, y: F.cross_entropy(net(x), y)) -> float:
    """A round of one step on one client equals w − η∇(task + term), and so does the loss it reports. Returns the term."""
    net = plain_net(fed.model)
    x, y = next_batch(fed, number)
    loss = task(net, x, y)
    added = term(net, x, y)
    total = loss + added
    total.backward()
    lr = fed.policy.lr_at(fed.round_number + 1)
    expected = {k: (p - lr * (p.grad if p.grad is not None else 0.0)).detach() for k, p in net.named_parameters()}
    report = fed.round([number])
    assert report.losses[number] == pytest.approx(total.item(), abs=2e-6)
    for k, p in expected.items():
        torch.testing.assert_close(fed.model["params"][k], p, atol=2e-6, rtol=1e-5, msg=k)
    return float(added.detach() if torch.is_tensor(added) else added)
