"""DANN: which parameters move in which step, against an ordinary loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, features, next_batch, plain_net
from torch import nn

from consilience.errors import ConfigError
from consilience.parts.dann import Dann
from consilience.testing import tiny_federation


def discriminator(params):
    net = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    net.load_state_dict({k.removeprefix("dann."): v.clone() for k, v in params.items() if k.startswith("dann.")})
    return net


def test_discriminator_first_then_the_model():
    fed = tiny_federation([Dann(weight=0.7, hidden=8)], **(ONE | {"weight_decay": 0.1}))
    net, disc = plain_net(fed.model), discriminator(fed.model["params"])
    x, y = next_batch(fed, 3)
    z = features(net, x)
    label = torch.full((len(x),), 3)
    # 1. the discriminator descends its own loss on fixed features; no weight decay
    grads = torch.autograd.grad(F.cross_entropy(disc(z.detach()), label), list(disc.parameters()))
    with torch.no_grad():
        for p, g in zip(disc.parameters(), grads):
            p -= fed.policy.lr * g
    # 2. the model minimises the task − λ times the new discriminator's loss; the discriminator stays
    loss = F.cross_entropy(net.head(z), y) - 0.7 * F.cross_entropy(disc(z), label)
    names = dict(net.named_parameters())
    grads = torch.autograd.grad(loss, list(names.values()))
    report = fed.round([3])
    assert report.losses[3] == pytest.approx(loss.item(), abs=2e-6)
    for (k, p), g in zip(names.items(), grads):
        torch.testing.assert_close(fed.model["params"][k], (p - fed.policy.lr * (g + 0.1 * p)).detach(), atol=2e-6, rtol=1e-5, msg=k)
    for k, p in disc.named_parameters():
        torch.testing.assert_close(fed.model["params"][f"dann.{k}"], p.detach(), atol=1e-6, rtol=1e-5, msg=k)


def test_the_discriminator_is_averaged_like_the_model():
    fed = tiny_federation([Dann(hidden=8)], **ONE)
    ends = []
    for i in (0, 3):
        one = tiny_federation([Dann(hidden=8)], **ONE)
        one.round([i])
        ends.append(one.model["params"]["dann.0.weight"])
    fed.round([0, 3])
    torch.testing.assert_close(fed.model["params"]["dann.0.weight"], (ends[0] + ends[1]) / 2)


def test_size_of_the_discriminator_does_not_touch_the_model():
    a, b = (tiny_federation([Dann(weight=0.0, hidden=h)]) for h in (4, 9))
    a.round()
    b.round()
    for k, p in a.model["params"].items():
        if not k.startswith("dann."):
            assert torch.equal(p, b.model["params"][k])


def test_one_client_is_refused():
    with pytest.raises(ConfigError, match="dann needs at least two clients"):
        tiny_federation([Dann()], sizes=(24,))
