"""Three sites as separate processes, TLS and node keys: the same method gives what the simulation gives.

The stated tolerance is none: sites train on one thread like the simulation here, so every bit of the model, of the server's state
and of what each site keeps must be the same. (On other hardware or with more threads sums are added in another order.)
"""

from __future__ import annotations

import re

import pytest
import torch

from consilience import tree
from consilience.engines.flower.settings import FederationSettings
from consilience.federation.demo import simulate
from consilience.federation.follow import run_and_follow
from consilience.federation.site import load_site
from consilience.runs.files import read_json, read_tensors

pytestmark = pytest.mark.federation
METHODS = ("fedavg", "scaffold", "fedfm(start=0)", "fedfa", "lfd", "fedbr", "fedavg+dbe")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_over_real_processes_equals_the_simulation(method, federation, tmp_path):
    document = run_and_follow(federation.launcher, federation.link, federation.app, tmp_path / "run", {"method": method},
                              name=re.sub(r"\W+", "-", method))
    settings = FederationSettings.make({**federation.settings.flat(), "method": method})
    sites = [load_site(s.site.data, number=s.site.number, classes=settings.agreed.classes, class_names=settings.agreed.class_names)
             for s in federation.sites]
    same = simulate(settings, sites)
    last = document["records"][-1]
    assert last["round"] == settings.run.run.rounds
    assert not any(r["lost"] for r in document["records"])

    trained = read_tensors(tmp_path / "run" / "final" / "global.safetensors")
    assert trained.keys() == same.global_model.keys()
    assert [k for k in trained if not torch.equal(trained[k], same.global_model[k])] == []
    checkpoint = read_tensors(tmp_path / "run" / "checkpoints" / f"round-{last['round']:06d}" / "state.safetensors")
    state = dict(tree.paths({"shared": same.federation.shared, "server": same.federation.server}))
    assert [k for k, t in state.items() if not torch.equal(checkpoint[k], t)] == []

    token = read_json(tmp_path / "run" / "federation.json")["token"]
    for number, running in enumerate(federation.sites):
        kept = read_tensors(running.site.store / "state" / token / f"site-{number}" / f"round-{last['round']:06d}" / "state.safetensors")
        expected = dict(tree.paths(same.federation.client(number).tensors))
        assert kept.keys() == expected.keys()
        assert [k for k in kept if not torch.equal(kept[k], expected[k])] == []

    for model in ("global", "personalised"):
        if same.records[-1][model] is not None:
            assert last[model]["per_client"] == pytest.approx(same.records[-1][model]["per_client"], abs=1e-9)
            assert last[model]["loss"] == pytest.approx(same.records[-1][model]["loss"], rel=1e-5)
