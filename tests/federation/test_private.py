"""Noise over real processes: it comes from the sites' own secrets, and the record says what it is worth."""

from __future__ import annotations

import pytest
import torch

from consilience.engines.flower.settings import FederationSettings
from consilience.federation.demo import simulate
from consilience.federation.follow import run_and_follow
from consilience.federation.site import load_site
from consilience.privacy.accountant import epsilon_of
from consilience.runs.files import read_tensors

pytestmark = pytest.mark.federation
METHOD = "scaffold+dp(noise=2, clip=0.01, scale=0.05)"


def test_noise_of_three_processes_is_secret_and_counted(federation, tmp_path):
    """Three sites, all answer: shares add up to z = 2, so Σ 1/z² is a quarter a round. The simulation's keyed noise is another."""
    document = run_and_follow(federation.launcher, federation.link, federation.app, tmp_path / "run", {"method": METHOD}, name="private")
    for number, record in enumerate(document["records"], start=1):
        said = record["privacy"]
        assert said["noise"] == "secret"
        assert said["epsilon"] == pytest.approx(epsilon_of(number / 4, 1e-5))
        assert said["epsilon_server"] == pytest.approx(epsilon_of(number * 3 / 4, 1e-5))
        assert said["epsilon_sampled"] is None
        assert record["losses"] == {}
    settings = FederationSettings.make({**federation.settings.flat(), "method": METHOD})
    sites = [load_site(s.site.data, number=s.site.number, classes=settings.agreed.classes, class_names=settings.agreed.class_names)
             for s in federation.sites]
    keyed = simulate(settings, sites).global_model
    trained = read_tensors(tmp_path / "run" / "final" / "global.safetensors")
    heads = [k for k in trained if k.endswith("weight")]
    assert heads
    assert not any(torch.equal(trained[k], keyed[k]) for k in heads)
    assert len({path.read_bytes() for s in federation.sites for path in s.site.store.rglob("secret")}) == 3
