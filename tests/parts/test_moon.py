"""MOON: the contrast's value and gradient against ordinary modules, its first round, its projection."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, check_step, features, next_batch, plain_net

from consilience.errors import ConfigError
from consilience.parts.moon import Moon
from consilience.runs.config import RunConfig
from consilience.testing import differences, in_model, run_tiny, tiny_federation


def contrast(fed, number, mu, tau):
    """μ·mean −log(e^{s_g/τ}/(e^{s_g/τ} + e^{s_p/τ})), with both references in evaluation mode and without gradient."""
    received, previous = plain_net(fed.model, train=False), plain_net(fed.client(number).tensors["previous"], train=False)

    def term(net, x, y):
        with torch.no_grad():
            near, far = features(received, x), features(previous, x)
        z = features(net, x)               # training mode does not read the statistics that the task's pass moved
        s_g = (z * near).sum(1) / z.norm(dim=1) / near.norm(dim=1)
        s_p = (z * far).sum(1) / z.norm(dim=1) / far.norm(dim=1)
        return mu * -torch.log(torch.exp(s_g / tau) / (torch.exp(s_g / tau) + torch.exp(s_p / tau))).mean()
    return term


def test_loss_and_gradient_against_plain_modules():
    fed = tiny_federation([Moon(mu=2.0, tau=0.5)], **ONE)
    fed.round([0])
    fed.round([1])                                            # so that received and previous differ for client 0
    assert check_step(fed, 0, contrast(fed, 0, 2.0, 0.5)) > 0.1


def test_by_hand_at_equal_references():
    # When received and previous models agree s_g = s_p, and the term is −log ½ whatever τ.
    fed = tiny_federation([Moon(mu=1.0, tau=0.3)], lr=1e-9, **ONE)
    plain = tiny_federation(lr=1e-9, **ONE)
    losses = [[f.round([0]).losses[0] for _ in range(2)] for f in (fed, plain)]
    assert losses[0][0] == losses[1][0]
    assert math.isclose(losses[0][1] - losses[1][1], math.log(2), abs_tol=1e-4)


def test_skipped_for_a_client_without_a_previous_model():
    fed, plain = tiny_federation([Moon(mu=10.0)]), tiny_federation()
    for f in (fed, plain):
        f.round([1])
        f.round([0])                                          # round two, but client 0's first
    assert not differences(fed, plain, only=in_model)
    fed.round([0])
    plain.round([0])
    assert differences(fed, plain, only=in_model)


def test_previous_model_survives_absence():
    fed = run_tiny([Moon()], rounds=1)
    before = fed.client(0).tensors["previous"]
    fed.round([1, 3])
    assert fed.client(0).tensors["previous"] is before


def test_projection_stands_before_the_head():
    fed = tiny_federation([Moon(projection=5)])
    shapes = {k: tuple(p.shape) for k, p in fed.model["params"].items() if k.startswith("head.")}
    assert shapes == {"head.inner.weight": (12, 12), "head.inner.bias": (12,), "head.outer.weight": (5, 12), "head.outer.bias": (5,),
                      "head.out.weight": (3, 5), "head.out.bias": (3,)}
    assert fed.spec.shapes["head.out:input"] == (5,)          # the contrast compares these
    assert all(k in fed.spec.shared for k in fed.model["params"])


def test_width_inside_the_projection():
    # FedBR's App. A gives MOON a two-layer projection, 256 wide and 128 at its end: d→256→128, then the head 128→C. Here 12→7→5→3.
    fed = tiny_federation([Moon(projection=5, hidden=7)])
    shapes = {k: tuple(p.shape) for k, p in fed.model["params"].items() if k.startswith("head.")}
    assert shapes == {"head.inner.weight": (7, 12), "head.inner.bias": (7,), "head.outer.weight": (5, 7), "head.outer.bias": (5,),
                      "head.out.weight": (3, 5), "head.out.bias": (3,)}


def test_width_inside_is_that_of_the_features_unless_it_is_set():
    assert not differences(run_tiny([Moon(projection=5)]), run_tiny([Moon(projection=5, hidden=12)]))      # TinyNet has 12 features


def test_a_stored_run_keeps_its_name():
    projected = {"moon.projection": 128}
    digests = [RunConfig.make({"method": "moon", "settings": s}).digest() for s in (projected, {**projected, "moon.hidden": 0},
                                                                                   {**projected, "moon.hidden": 256})]
    assert digests[0] == digests[1] != digests[2]


def test_width_without_a_projection_is_refused():
    with pytest.raises(ConfigError, match="moon has hidden without a projection"):
        tiny_federation([Moon(hidden=7)])


@pytest.mark.parametrize("hidden", [0, 7])
def test_contrast_is_taken_behind_the_projection(hidden):
    fed = tiny_federation([Moon(mu=1.0, projection=5, hidden=hidden)], **ONE)
    fed.round([0])
    fed.round([1])

    def projected(model, x, train):
        z = features(plain_net(model, train), x)
        p = model["params"]
        return F.linear(F.linear(z, p["head.inner.weight"], p["head.inner.bias"]).relu(), p["head.outer.weight"], p["head.outer.bias"])
    x, y = next_batch(fed, 0)
    p = fed.model["params"]
    z = projected(fed.model, x, True)
    near, far = projected(fed.model, x, False), projected(fed.client(0).tensors["previous"], x, False)
    cross_entropy = F.cross_entropy(F.linear(z, p["head.out.weight"], p["head.out.bias"]), y)
    s_g, s_p = F.cosine_similarity(z, near), F.cosine_similarity(z, far)
    term = -torch.log(torch.exp(s_g / 0.5) / (torch.exp(s_g / 0.5) + torch.exp(s_p / 0.5))).mean()
    assert math.isclose(fed.round([0]).losses[0], (cross_entropy + term).item(), abs_tol=3e-6)
