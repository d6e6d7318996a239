"""FedFomo: gains, weights, what is delivered and what is held back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from one_step import plain_net

from consilience import tree
from consilience.core.client import ClientView, LocalWork
from consilience.errors import ConfigError, RefusedCombination
from consilience.parts.avgm import Avgm
from consilience.parts.fomo import Fomo
from consilience.testing import run_tiny, tiny_federation

SIZES = (24, 20, 32, 40)


def model_of(fed, i):
    return fed.received(fed.client(i))


def held_loss(fed, number, params):
    """Mean cross-entropy on the samples held back, with the client's own statistics."""
    rows = fed.samples.rows[number].reserved
    net = plain_net({"params": params, "buffers": model_of(fed, number)["buffers"]}, train=False)
    with torch.no_grad():
        return F.cross_entropy(net(fed.samples.x[rows]), fed.samples.y[rows]).item()


def gain(fed, number, params):
    old = fed.client(number).tensors["kept"]["fomo"]["before"]
    distance = sum((params[k] - old[k]).square().sum().item() for k in old) ** 0.5
    return (held_loss(fed, number, old) - held_loss(fed, number, params)) / (distance + 1e-5)


def receive(fed, number):
    """What a client starts its coming round with, and the gains it notes."""
    part = fed.method.parts[0]
    fed.round_number += 1
    with torch.no_grad():
        down = part.deliver(fed.serve(part, "deliver", [number]), number)
        state = fed.client(number)
        out = part.receive(ClientView(fed, number, part, model_of(fed, number), state, "receive", [number], download=down))
    fed.round_number -= 1
    return down, out


def test_mixture_by_hand():
    fed = run_tiny([Fomo(download=5)], rounds=2, sizes=SIZES)
    trained = {i: model_of(fed, i)["params"] for i in range(4)}
    before = fed.client(0).tensors["kept"]["fomo"]["before"]
    assert not torch.equal(before["head.weight"], trained[0]["head.weight"])
    down, (mixed, scratch) = receive(fed, 0)
    assert down["who"].sort().values.tolist() == [1, 2, 3]        # the client's own model needs no delivery
    u = {i: gain(fed, 0, trained[i]) for i in range(4)}           # its own trained model is a candidate
    positive = {i: max(v, 0.0) for i, v in u.items()}
    total = sum(positive.values())
    assert positive[0] > 0
    for k in mixed:
        expected = sum(positive[i] / total * trained[i][k] for i in range(4))
        torch.testing.assert_close(mixed[k], expected, atol=1e-5, rtol=1e-3)
    assert scratch["gain"].tolist() == pytest.approx([0.0, u[1], u[2], u[3]], rel=2e-3, abs=1e-4)


def test_first_round_has_no_models_to_send():
    fed = tiny_federation([Fomo()], sizes=SIZES)
    start = tree.clone(fed.model)
    down, (mixed, _) = receive(fed, 0)
    assert down == {}
    assert all(torch.equal(mixed[k], p) for k, p in start["params"].items())
    assert fed.round().bytes_down == 0


def test_a_client_whom_nothing_helps_keeps_its_model():
    fed = run_tiny([Fomo()], rounds=1, sizes=SIZES)
    own = model_of(fed, 0)["params"]
    # make the past perfect: with θ_old the trained model itself its own gain is 0, and worse models gain nothing
    state = fed.client(0)
    worse = {i: tree.map(lambda t: t + 10 * torch.ones_like(t), own) for i in (1, 2, 3)}
    kept = {"fomo": {"before": own}}
    fed.clients.put(0, type(state)(state.tensors | {"kept": kept}, state.first, state.seen, state.own_round))
    store = {k: torch.stack([own[k], *(worse[i][k] for i in (1, 2, 3))]) for k in own}
    fed.server = {"fomo": fed.server["fomo"] | {"models": store}}
    _, (mixed, scratch) = receive(fed, 0)
    assert (scratch["gain"] <= 0).all()
    assert all(torch.equal(mixed[k], own[k]) for k in own)


def test_server_sends_the_most_promising_of_those_it_has():
    fed = run_tiny([Fomo(download=2)], rounds=0, sizes=SIZES)
    fed.round([0, 1, 3])                                          # client 2 has uploaded nothing
    affinity = fed.server["fomo"]["affinity"].clone()
    affinity[0] = torch.tensor([9.0, -0.5, 7.0, 0.25])
    fed.server = {"fomo": fed.server["fomo"] | {"affinity": affinity}}
    down, _ = receive(fed, 0)
    assert down["who"].tolist() == [3, 1]
    for k, t in down["models"].items():
        assert torch.equal(t[0], model_of(fed, 3)["params"][k])
    down, _ = receive(fed, 2)
    assert len(down["who"]) == 2


def test_affinity_adds_up_the_gains():
    fed = run_tiny([Fomo()], rounds=1, sizes=SIZES)
    assert torch.equal(fed.server["fomo"]["affinity"], torch.eye(4))
    _, (_, scratch) = receive(fed, 1)
    fed.round([1])
    expected = torch.eye(4)
    expected[1] += scratch["gain"]
    torch.testing.assert_close(fed.server["fomo"]["affinity"], expected)


def test_training_starts_from_the_mixture_and_remembers_it():
    fed = run_tiny([Fomo()], rounds=2, sizes=SIZES)
    _, (mixed, _) = receive(fed, 2)
    fed.round([2])
    kept = fed.client(2).tensors["kept"]["fomo"]["before"]
    assert all(torch.equal(kept[k], p) for k, p in mixed.items())
    assert not torch.equal(model_of(fed, 2)["params"]["head.weight"], mixed["head.weight"])


def test_a_fifth_is_held_back_and_never_trained_on():
    fed = tiny_federation([Fomo()], sizes=SIZES)
    for number, size in enumerate(SIZES):
        rows = fed.samples.rows[number]
        assert len(rows.reserved) == size // 5
        assert sorted([*rows.train.tolist(), *rows.reserved.tolist()]) == fed.population.rows[number].tolist()
        work = LocalWork(fed, number, fed.client(number), [number], {})
        order = fed.samples.order(number, fed.round_number, work.schedule)
        assert not set(order.flatten().tolist()) & set(rows.reserved.tolist())


def test_bytes():
    fed = tiny_federation([Fomo(download=2)], sizes=SIZES)
    model = sum(p.numel() * 4 for p in fed.model["params"].values())
    first, second = fed.round(), fed.round()
    assert (first.bytes_down, second.bytes_down) == (0, 4 * (2 * model + 2 * 8))       # two models and two client numbers each
    assert first.bytes_up == second.bytes_up == 4 * (model + 4 * 4)                    # a model and a row of gains each


def test_refusals():
    with pytest.raises(ConfigError, match="fomo needs at least two clients"):
        tiny_federation([Fomo()], sizes=(24,))
    with pytest.raises(ConfigError, match=r"fomo sends whole models to other clients.*batchnorm=params"):
        tiny_federation([Fomo()], batchnorm="local")
    with pytest.raises(RefusedCombination, match=r"avgm.*fomo|fomo.*avgm"):
        tiny_federation([Fomo(), Avgm()])
