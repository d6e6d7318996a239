"""Every BatchNorm policy; what moves statistics and what must not."""

from __future__ import annotations

import pytest
import torch
from core_parts import Plain, Remember, federation, seeded
from torch import nn

from consilience import tree
from consilience.parts.gen import Gen
from consilience.parts.moon import Moon
from consilience.parts.mr import Mr
from consilience.parts.ntd import Ntd
from consilience.parts.sam import Sam
from consilience.testing import differences, in_model, run_tiny, tiny_federation

POLICIES = ("all", "params", "local")
COUNTER = "stage1.1.num_batches_tracked"


@pytest.mark.parametrize("batchnorm", POLICIES)
def test_no_clients_result_depends_on_another(batchnorm):
    ends = []
    for cohort in ([0], [0, 1, 3], [3, 1, 0]):
        fed = tiny_federation([Remember()], batchnorm=batchnorm)
        fed.round([3])                                           # a past that all three share
        fed.round(cohort)
        ends.append(fed.client(0).tensors)
    for other in ends[1:]:
        for (path, a), (_, b) in zip(tree.paths(ends[0]), tree.paths(other)):
            assert torch.equal(a, b), path


@pytest.mark.parametrize("batchnorm", POLICIES)
@pytest.mark.parametrize("part", [Moon(mu=0.0), Ntd(beta=0.0), Sam(rho=0.0), Mr(kappa=0.0)], ids=lambda p: p.name)
def test_reference_forwards_move_nothing(part, batchnorm):
    # these parts run other models, or the same model twice; at strength zero FedAvg's statistics must come out bit for bit
    alone, beside = run_tiny(batchnorm=batchnorm), run_tiny([part], batchnorm=batchnorm)
    trained = tuple(f"clients/{i}/local" for i in (0, 1, 3))
    assert not differences(alone, beside, only=lambda k: in_model(k) or k.startswith(trained))


def test_looking_moves_nothing():
    fed = run_tiny(rounds=1)
    before = tree.clone(fed.model)
    for train in (False, True):
        fed.look(0, fed.client(0), fed.model, fed.samples.x[:8], train, True)
    for path, t in tree.paths(fed.model):
        assert torch.equal(t, dict(tree.paths(before))[path]), path


def test_building_moves_nothing():
    # the probe runs in training mode
    fed = tiny_federation([Moon(projection=4), Mr()])
    assert fed.model["buffers"][COUNTER].item() == 0
    assert torch.equal(fed.model["buffers"]["stage1.1.running_mean"], torch.zeros(4))
    fed.prepare()                                                # trains on every client, on the side
    assert fed.model["buffers"][COUNTER].item() == 0
    assert torch.equal(fed.model["buffers"]["stage1.1.running_mean"], torch.zeros(4))


def test_applying_a_head_with_batchnorm_moves_nothing():
    def with_norm():
        net = Plain()
        net.head = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 3))
        return net
    plain, gen = federation(seeded(with_norm)), federation(seeded(with_norm), Gen(weight=0.0, steps=2, noise=2, hidden=4))
    plain.round()
    gen.round()
    for k, b in plain.model["buffers"].items():
        assert torch.equal(gen.model["buffers"][k], b), k


def test_counters_are_copied_not_averaged():
    # epochs 2: client 0 makes 6 steps, client 3 makes 10. The mean, 8, belongs to nobody.
    fed = tiny_federation()
    fed.round([0, 3])
    assert fed.model["buffers"][COUNTER].item() == 10
    assert fed.model["buffers"][COUNTER].dtype == torch.int64
    fed.round([0])
    assert fed.model["buffers"][COUNTER].item() == 16


def test_all_averages_statistics_with_the_runs_weights():
    ends = {}
    for i in (0, 3):
        one = tiny_federation(weights="samples")
        one.round([i])
        ends[i] = one.model["buffers"]["stage1.1.running_mean"]
    fed = tiny_federation(weights="samples")
    fed.round([0, 3])
    torch.testing.assert_close(fed.model["buffers"]["stage1.1.running_mean"], 24 / 64 * ends[0] + 40 / 64 * ends[3])


@pytest.mark.parametrize(("batchnorm", "moves"), [("params", True), ("local", False)])
def test_statistics_stay_on_the_clients(batchnorm, moves):
    fed, start = run_tiny(batchnorm=batchnorm), tiny_federation().model
    for k, b in start["buffers"].items():
        assert torch.equal(fed.model["buffers"][k], b), k
    assert torch.equal(fed.model["params"]["stage1.1.weight"], start["params"]["stage1.1.weight"]) is not moves
    assert not torch.equal(fed.model["params"]["stage1.0.weight"], start["params"]["stage1.0.weight"])
    assert "statistics stay on the clients" in fed.no_global_model
    assert tiny_federation().no_global_model is None
    # each client goes on from its own: 2 rounds × 6 steps, and 2 × 10
    assert [fed.client(i).tensors["local"][COUNTER].item() for i in (0, 3)] == [12, 20]
    model, _ = fed.personal_model(0)
    assert model["buffers"][COUNTER].item() == 12
    assert torch.equal(fed.client(2).tensors["local"]["stage1.1.running_mean"], torch.zeros(4))        # never made a step
    assert fed.personal


def test_policies_differ():
    ends = [run_tiny(batchnorm=b) for b in POLICIES]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert differences(ends[a], ends[b], only=in_model)
