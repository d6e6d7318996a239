"""The next round, played aside: equal to the round itself, and no trace of it in the federation."""

from __future__ import annotations

import pytest
import torch

from consilience import tree
from consilience.errors import ConfigError
from consilience.metrics.gather import Asked, gather
from consilience.metrics.local_training import train_all, watch_client
from consilience.metrics.parameters import drift
from consilience.parts.stack import parse_stack
from consilience.testing import LAYOUT, run_tiny, state_of, trial

METHODS = ("fedavg", "scaffold", "dbe", "moon", "ditto", "fedfm", "fedgen", "fedbn", "fedbr", "fedfomo", "fedrep", "local",
           "fedproto", "pfedme", "apple")


def tiny(method: str):
    return run_tiny([trial(type(p)) for p in parse_stack(method).parts], rounds=2)


@pytest.mark.parametrize("method", METHODS)
def test_the_round_aside_is_the_next_round_and_leaves_nothing(method):
    fed = tiny(method)
    numbers = ("round_number", "last_exchange", "clock", "prepared", "versions")
    before, plain = state_of(fed), {name: getattr(fed, name) for name in numbers}
    trained = train_all(fed)
    seen = {}
    watch_client(fed, 1, 3, lambda step, of, model: seen.update({step: tree.clone(model), "of": of}))
    after = state_of(fed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert plain == {name: getattr(fed, name) for name in numbers}
    # the client watched ends where the whole round's client ended, bit for bit
    assert max(k for k in seen if k != "of") == seen["of"] > 0
    end = seen[seen["of"]]
    assert all(torch.equal(end["params"][k], trained.outcomes[1].model["params"][k]) for k in end["params"])
    # client 2 cannot fill a batch
    assert sorted(trained.outcomes) == [0, 1, 3]
    report = fed.round()
    assert report.exchanged == trained.exchanged
    for half in fed.model:
        assert all(torch.equal(fed.model[half][k], trained.aggregated[half][k]) for k in fed.model[half])
    for number, outcome in trained.outcomes.items():
        kept = dict(tree.paths(fed.client(number).tensors))
        assert all(torch.equal(kept[path], leaf) for path, leaf in tree.paths(outcome.state.tensors))


def test_watching_shows_the_start_the_end_and_every_so_many_steps():
    fed = tiny("fedavg")
    steps = []
    watch_client(fed, 0, 4, lambda step, of, model: steps.append((step, of)))
    # 24 samples, batches of 8, 2 epochs: 6 steps
    assert steps == [(0, 6), (4, 6), (6, 6)]
    first = {}
    watch_client(fed, 0, 4, lambda step, of, model: first.setdefault("model", tree.clone(model)))
    assert all(torch.equal(first["model"]["params"][k], fed.model["params"][k]) for k in fed.model["params"])


def test_served_after_training_is_the_personal_model():
    fed = tiny("ditto")
    outcome = train_all(fed).outcomes[0]
    model, taps = fed.served(0, outcome.state, outcome.model)
    own = outcome.state.tensors["personal"]["ditto"]["model"]
    assert all(torch.equal(model["params"][k], own["params"][k]) for k in own["params"])
    assert any(not torch.equal(model["params"][k], outcome.model["params"][k]) for k in own["params"])
    assert isinstance(taps, bool)


def test_gather_gives_logits_features_and_any_module():
    fed = tiny("dbe")
    state, rows = fed.client(0), torch.arange(30)
    model, taps = fed.personal_model(0)
    say = lambda point, taps: gather(fed, [Asked(0, state, model, taps, rows, 0)], point).values
    logits, features, header = say("logits", taps), say("features", taps), say("header", taps)
    assert logits.shape == (30, 3)
    assert features.shape == header.shape == (30, 12)
    weight, bias = model["params"]["head.weight"], model["params"]["head.bias"]
    assert torch.allclose(features @ weight.T + bias, logits, atol=1e-5)
    # DBE's z = z_g + p: with personal tensors, and without
    shift = state.tensors["personal"]["prbm"]["shift"]
    assert torch.allclose(features - say("features", False), shift.expand(30, -1), atol=1e-5)
    assert say("stage1", taps).shape == (30, 4 * 4 * 4)
    hooks = fed.program.network.module.get_submodule("stage1")._forward_hooks
    assert not hooks                                                # nothing stays attached
    with pytest.raises(ConfigError, match=r"no module 'stage2' .* Did you mean .*'stage1'"):
        say("stage2", taps)


def test_drift_by_hand():
    # head moves by (3, 4): length 5; the header not at all; the extractor by 12: whole √(25 + 144) = 13; ‖w‖: head √2, extractor 1
    start = {"stage1.w": torch.tensor([1.0]), "header.w": torch.tensor([2.0]), "head.w": torch.tensor([1.0, 1.0])}
    local = {"stage1.w": torch.tensor([13.0]), "header.w": torch.tensor([2.0]), "head.w": torch.tensor([4.0, 5.0])}
    got = drift(local, start, LAYOUT)
    assert {k: v["absolute"] for k, v in got.items()} == pytest.approx({"extractor": 12.0, "header": 0.0, "head": 5.0, "whole": 13.0})
    assert got["head"]["relative"] == pytest.approx(5 / 2**0.5)
    assert got["whole"]["relative"] == pytest.approx(13 / 7**0.5)
    assert "header" not in drift({"head.w": start["head.w"]}, {"head.w": start["head.w"]}, LAYOUT)
