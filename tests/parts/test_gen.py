"""FedGen: label counts, the client's term and the server's training, against ordinary modules and torch.optim.Adam."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from one_step import ONE, check_step
from torch import nn

from consilience import rng, tree
from consilience.errors import RefusedCombination
from consilience.parts.gen import Gen
from consilience.parts.local import Local
from consilience.parts.per import Per
from consilience.parts.prox import Prox
from consilience.testing import tiny_federation

SMALL = {"noise": 4, "hidden": 8, "steps": 3}


@dataclass(frozen=True)
class StillGen(Gen):
    """FedGen whose server does not train after a round."""

    def server(self, s):
        return super().server(s) if s.stage == "prepare" else (s.shared, s.server)


def generator(values):
    """The generator as an ordinary module; BatchNorm in training mode normalises by the batch."""
    net = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 12))
    with torch.no_grad():
        for layer, name in ((0, "in"), (1, "norm"), (3, "out")):
            net[layer].weight.copy_(values[f"{name}.weight"])
            net[layer].bias.copy_(values[f"{name}.bias"])
    return net


def draws(key, counts, many):
    """Labels and noise of one draw: labels in proportion to the counts."""
    u = rng.uniform(rng.key(key, "label"), (many,)) * counts.sum()
    labels = torch.tensor([next(c for c in range(3) if v <= counts[: c + 1].sum()) for v in u])
    noise = rng.uniform(rng.key(key, "noise"), (many, 4))
    return labels, torch.cat([noise, torch.eye(3)[labels]], 1)


def test_label_counts_of_all_clients_are_summed():
    fed = tiny_federation([Gen(**SMALL)])
    fed.prepare()
    y = fed.population.y
    assert fed.shared["gen"]["labels"].tolist() == [int((y == c).sum()) for c in range(3)]


def test_labels_are_drawn_in_proportion():
    # counts 1 : 0 : 3 over 8000 draws: a quarter zeros (standard error 0.0048), no ones
    y = Gen()._labels(torch.tensor([1.0, 0.0, 3.0]), rng.key(5), 8000)
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.025)
    assert not (y == 1).any()


def test_client_term_against_plain_modules():
    fed = tiny_federation([Gen(weight=0.5, **SMALL)], **ONE)
    fed.round([0])                                             # so that the generator is trained a little
    step_key = rng.fold(rng.key(0, "step", 3, 2, "round"), 0)
    labels, inputs = draws(rng.key(step_key, "batch", "gen", "generated"), fed.shared["gen"]["labels"], 8)
    generated = generator(fed.shared["gen"]["generator"])(inputs).detach()
    assert check_step(fed, 3, lambda net, x, y: 0.5 * F.cross_entropy(net.head(generated), labels)) > 0.1


def test_clients_do_not_touch_the_generator():
    fed = tiny_federation([StillGen(**SMALL)])
    fed.prepare()
    before = tree.clone(fed.shared["gen"])
    fed.round()
    for path, t in tree.paths(fed.shared["gen"]):
        assert torch.equal(t, dict(tree.paths(before))[path]), path


def test_server_training_against_torchs_adam():
    fed, still = tiny_federation([Gen(**SMALL)]), tiny_federation([StillGen(**SMALL)])
    optimiser, net = None, None
    for round_number in (1, 2):                                 # Adam's moments persist over rounds
        heads = client_heads(still, fed)
        fed.round()
        if net is None:
            start = tiny_federation([Gen(**SMALL)]).shared["gen"]["generator"]
            net = generator(start)
            optimiser = torch.optim.Adam(net.parameters(), lr=0.005)
        for t in range(3):
            key = rng.key(rng.key(0, "gen", "server", "finish", round_number), t)
            labels, inputs = draws(key, fed.shared["gen"]["labels"], 8)
            z = net(inputs)
            logits = sum(p * F.linear(z, h["head.weight"], h["head.bias"]) for p, h in heads)
            optimiser.zero_grad()
            F.cross_entropy(logits, labels).backward()
            optimiser.step()
        now = fed.shared["gen"]["generator"]
        for layer, name in ((0, "in"), (1, "norm"), (3, "out")):
            torch.testing.assert_close(now[f"{name}.weight"], net[layer].weight.detach(), atol=2e-5, rtol=1e-4)


def client_heads(still, fed):
    """(weight, trained parameters) of each client's coming round, taken one client at a time on a copy whose server rests."""
    out = []
    fed.prepare()
    for i in (0, 1, 3):
        still.model, still.shared, still.round_number, still.prepared = fed.model, fed.shared, fed.round_number, True
        still.round([i])
        out.append((1 / 3, still.model["params"]))
    return out


def test_server_training_lowers_its_loss():
    fed = tiny_federation([Gen(noise=4, hidden=16, steps=60)])
    fed.prepare()
    losses = []
    for _ in range(2):
        params = fed.model["params"]
        labels, inputs = draws(rng.key(99), fed.shared["gen"]["labels"], 64)
        g = fed.shared["gen"]["generator"]
        h = F.batch_norm(F.linear(inputs, g["in.weight"], g["in.bias"]), None, None, g["norm.weight"], g["norm.bias"], training=True)
        z = F.linear(h.relu(), g["out.weight"], g["out.bias"])
        losses.append(F.cross_entropy(F.linear(z, params["head.weight"], params["head.bias"]), labels).item())
        fed.round()
    assert losses[1] < 0.7 * losses[0]


def test_absent_weight_leaves_other_parts_alone():
    fed = tiny_federation([Gen(weight=0.0, **SMALL), Prox(mu=0.1)])
    plain = tiny_federation([Prox(mu=0.1)])
    fed.round()
    plain.round()
    assert all(torch.equal(fed.model["params"][k], p) for k, p in plain.model["params"].items())


@pytest.mark.parametrize("part", [Per(), Local()])
def test_needs_heads_that_are_shared(part):
    with pytest.raises(RefusedCombination, match="heads that clients share"):
        tiny_federation([Gen(), part])
