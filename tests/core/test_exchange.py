"""Models that travel only now and then: a client goes on from its own between two exchanges."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from consilience import tree
from consilience.core.part import Part
from consilience.errors import RefusedCombination
from consilience.parts.anchors import Anchors
from consilience.parts.avgm import Avgm
from consilience.parts.local import Local
from consilience.parts.scaffold import Scaffold
from consilience.testing import tiny_federation


@dataclass(frozen=True)
class EveryThird(Part):
    name = "third"

    def exchange(self, round_number: int) -> bool:
        return round_number % 3 == 0


def flat(model):
    return {**model["params"], **model["buffers"]}


def test_models_stay_where_they_are_until_the_exchange():
    fed, alone = tiny_federation([EveryThird()]), tiny_federation([Local()])
    start = fed.model
    for number in (1, 2):
        report = fed.round()
        alone.round()
        assert not report.exchanged
        assert fed.model is start
        assert report.bytes_up == 0
        for i in (0, 1, 3):                                       # each on its own, as without communication
            own, local = flat(fed.client(i).tensors["own"]), alone.client(i).tensors["local"]
            assert all(torch.equal(own[k], v) for k, v in local.items()), (number, i)
    report = fed.round()
    alone.round()
    assert report.exchanged
    ends = [alone.client(i).tensors["local"] for i in (0, 1, 3)]
    for k, v in fed.model["params"].items():                      # the plain average of three rounds of own training
        torch.testing.assert_close(v, sum(e[k] for e in ends) / 3, atol=1e-6, rtol=1e-5)
    assert report.bytes_up == 3 * tree.count_bytes(fed.model)


def test_after_an_exchange_clients_start_from_the_average():
    fed = tiny_federation([EveryThird()])
    for _ in range(3):
        fed.round()
    for i in (0, 2):
        received = fed.received(fed.client(i))
        assert all(torch.equal(received["params"][k], v) for k, v in fed.model["params"].items())
    fed.round([0])
    assert not torch.equal(fed.received(fed.client(0))["params"]["head.weight"], fed.model["params"]["head.weight"])
    assert torch.equal(fed.received(fed.client(1))["params"]["head.weight"], fed.model["params"]["head.weight"])


def test_a_client_that_missed_rounds_takes_the_last_average():
    fed = tiny_federation([EveryThird()])
    fed.round([0])
    fed.round([1])                                                 # its first round: from the initial model
    start = tiny_federation().model
    assert fed.client(0).own_round == 1
    assert fed.client(1).own_round == 2
    fed.round([0])                                                 # an exchange without client 1
    assert fed.last_exchange == 3
    received = fed.received(fed.client(1))                         # its own model is older than the exchange
    assert torch.equal(received["params"]["head.weight"], fed.model["params"]["head.weight"])
    assert not torch.equal(received["params"]["head.weight"], start["params"]["head.weight"])


def test_bytes_down_when_the_client_goes_on_from_its_own():
    fed = tiny_federation([EveryThird()])
    model = tree.count_bytes(fed.model)
    assert fed.round().bytes_down == 3 * model                    # first contact
    assert fed.round().bytes_down == 0                            # nobody needs the server's model
    assert fed.round().bytes_down == 0
    assert fed.round().bytes_down == 3 * model                    # the new average


LITE = Anchors(lite=True, every=3, start=0)


def test_statistics_still_travel_in_between():
    fed = tiny_federation([LITE])
    reports = [fed.round() for _ in range(3)]
    assert [r.exchanged for r in reports] == [False, False, True]
    # three clients send twelve sums and a count for each of three classes, 4 bytes each
    assert reports[0].bytes_up == reports[1].bytes_up == 3 * 3 * (12 + 1) * 4
    assert reports[2].bytes_up == reports[0].bytes_up + 3 * tree.count_bytes(fed.model)


@pytest.mark.parametrize("part", [Avgm(), Scaffold()], ids=lambda p: p.name)
def test_parts_that_act_on_every_average_refuse_it(part):
    with pytest.raises(RefusedCombination, match="average of the clients' models in every round"):
        tiny_federation([LITE, part])
    tiny_federation([Anchors(lite=True, every=1, start=0), part])
