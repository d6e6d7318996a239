"""Clipping and noise in a federation: what leaves a site is final, its noise is its own secret, and ε is in the record."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_federation import Fake, simulate, unequal

from consilience import tree
from consilience.engines.flower.build import build_for_server
from consilience.engines.flower.roster import TooFewAnswers
from consilience.privacy.accountant import epsilon_of

NOISY: dict[str, Any] = {"settings.dp.noise": 2.0, "settings.dp.clip": 0.02, "rounds": 2}


@pytest.mark.parametrize("method", ["dp", "scaffold+dp", "fedfm+dp", "fedfa+dp"])
def test_clipping_alone_equals_the_simulation(method: str, tmp_path: Path) -> None:
    fake = Fake(tmp_path, method, rounds=2, **{"settings.dp.noise": 0.0, "settings.dp.clip": 0.05})
    records = fake.run()
    assert not unequal(fake, simulate(fake.settings))
    assert records[-1]["privacy"]["epsilon"] is None


def test_a_restarted_site_is_clipped_beside_the_server_s_model(tmp_path: Path) -> None:
    """In FedFM-Lite sites go on from models of their own for three rounds. What they send then is their change of the model that the
    server has, which a site that was started anew in between must know, though it did not train from it.
    """
    seen: set[int] = set()

    def restart(site: int, request: Any, work: Any) -> Any:
        if site != 1 or request.about["task"] != "train" or request.about["round"] in seen:
            return work()
        seen.add(request.about["round"])
        fake.restart(1)
        return fake.sites[1].answer(request)
    settings = {"settings.anchors.lite": True, "settings.anchors.every": 3, "settings.dp.noise": 0.0, "settings.dp.clip": 0.05}
    fake = Fake(tmp_path, "fedfm+dp", restart, model="mlp", **{**settings, "rounds": 6})
    fake.run()
    assert seen == {1, 2, 3, 4, 5, 6}
    assert not unequal(fake, simulate(fake.settings))


def test_the_server_warns_of_noise_that_drowns_what_it_hides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those who follow a run pass on what its server warns of."""
    fake = Fake(tmp_path, "dp", **{**NOISY, "rounds": 1})
    fake.run()
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.partition(", with 4 clients in a round")[1] for line in said] == [", with 4 clients in a round"]


def test_noise_is_secret_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four sites are expected, three train: Σ 1/z² is (1/4)·(4/3) a round. Nothing is claimed for sampling, and no loss is told."""
    told: list[Any] = []

    def listen(site: int, request: Any, work: Any) -> Any:
        answer = work()
        told.append(answer.about.get("loss", 0.0))
        return answer
    fake = Fake(tmp_path, "dp", listen, **NOISY)
    with caplog.at_level("INFO", "consilience.federation"):
        records = fake.run()
    assert f"Privacy: ε = {records[-1]['privacy']['epsilon']:.2f} at δ = 1e-05" in caplog.text
    for number, record in enumerate(records, start=1):
        said = record["privacy"]
        assert said["noise"] == "secret"
        assert said["epsilon"] == pytest.approx(epsilon_of(number / 3, 1e-5))
        assert said["epsilon_server"] == pytest.approx(epsilon_of(number * 4 / 4, 1e-5))
        assert said["epsilon_sampled"] is None
        assert record["losses"] == {}
        assert record["loss"] is None
    assert set(told) == {0.0}
    keyed = simulate(fake.settings)
    assert not any(torch.equal(fake.fed.model["params"][k], keyed.model["params"][k]) for k in keyed.model["params"])


@pytest.mark.parametrize(("place", "deviation"), [("client", (1 / 12) ** 0.5), ("server", 1 / 3), ("local", (1 / 3) ** 0.5)])
def test_the_average_has_the_noise_that_is_counted(place: str, deviation: float, tmp_path: Path) -> None:
    """As in simulation: lr ≈ 0, z·C = 6, three of four sites. client: 3·(36/4)/9; server: 36/9; local: 3·36/9."""
    fake = Fake(tmp_path, "dp", rounds=1, lr=1e-30, **{"settings.dp.noise": 3.0, "settings.dp.clip": 2.0, "settings.dp.place": place})
    fake.run()
    before = build_for_server(fake.settings, [24] * 4).model["params"]
    noise = torch.cat([(fake.fed.model["params"][k] - w).flatten() for k, w in before.items()])
    assert len(noise) > 5000
    assert float(noise.std()) == pytest.approx(6 * deviation, rel=0.05)


def test_secrets_are_each_site_s_own_and_never_travel(tmp_path: Path) -> None:
    wire: list[bytes] = []

    def listen(site: int, request: Any, work: Any) -> Any:
        answer = work()
        for parcel in (request, answer):
            wire.append(repr(parcel.about).encode() + b"".join(raw.data for raw in parcel.arrays.values()))
        return answer
    fake = Fake(tmp_path, "dp", listen, **NOISY)
    fake.run()
    files = [path for path in tmp_path.rglob("secret") if path.is_file()]
    secrets = {path.read_bytes() for path in files}
    assert len(secrets) == len(files) == 5                      # four sites and the server
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert not any(s in sent or s.hex().encode() in sent for s in secrets for sent in wire)


def test_a_damaged_secret_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without one noise would be keyed by the seed, which everybody knows."""
    def empty(site: int, request: Any, work: Any) -> Any:
        if (site, request.about["task"], request.about["round"]) == (1, "train", 2):
            for path in tmp_path.glob("store1/*/site-1/secret"):
                path.write_bytes(b"")
        return work()
    records = Fake(tmp_path, "dp", empty, **NOISY).run()
    assert [r["lost"] for r in records] == [[], ["site-1"]]
    assert "is damaged: it has 0 bytes, not 32" in caplog.text


def test_an_upload_that_is_asked_for_again_is_the_same_upload(tmp_path: Path) -> None:
    """The first answer of site 1 is lost after it left, and the round is tried again: what is sent then tells nothing new."""
    sent: list[dict[str, bytes]] = []

    def lose(site: int, request: Any, work: Any) -> Any:
        answer = work()
        if (site, request.about["task"], request.about["round"]) != (1, "train", 1):
            return answer
        sent.append({name: raw.data for name, raw in answer.arrays.items()})
        return None if len(sent) == 1 else answer
    fake = Fake(tmp_path, "scaffold+dp", lose, min_sites=3, **NOISY)
    records = fake.run()
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert records[-1]["privacy"]["releases"] == 2


def test_a_site_that_does_not_answer_costs_the_others(tmp_path: Path) -> None:
    """Two of four shares arrive in round two: 1/z² = (1/4)·(4/2)."""
    silent = lambda site, request, work: None if (site, request.about["task"], request.about["round"]) == (1, "train", 2) else work()
    fake = Fake(tmp_path, "dp", silent, **NOISY)
    records = fake.run()
    assert records[-1]["lost"] == ["site-1"]
    assert fake.fed.server["dp"]["spent"].tolist() == pytest.approx([1 / 3 + 1 / 2, 1 / 3, 0, 1 / 3 + 1 / 2])
    assert fake.fed.server["dp"]["seen"].tolist() == pytest.approx([2, 2, 0, 2])       # its upload may have come too late


@pytest.mark.parametrize("killed", [False, True])
def test_a_site_that_was_asked_in_vain_is_counted(killed: bool, tmp_path: Path) -> None:
    """Two of the sites are drawn for the round, 0 and 3. Site 3 sends its upload, which does not arrive, and is gone when the round is
    done again: with 0 and 2, by the same server or by one that is started anew. The first server has seen what 3 sent.
    """
    def lose(site: int, request: Any, work: Any) -> Any:
        answer = work()
        if (site, request.about["task"]) != (3, "train"):
            return answer
        fake.link.away = {103}
        return None
    values = {**NOISY, "rounds": 1, "participation": 2, "settings.dp.place": "local", "retries": 0 if killed else 1}
    fake = Fake(tmp_path, "dp", lose, **values)
    if killed:
        with pytest.raises(TooFewAnswers):
            fake.run()
    record = fake.run()[-1]
    assert record["cohort"] == ["site-0", "site-2"]
    assert fake.fed.server["dp"]["spent"].tolist() == [0.25, 0, 0, 0]                   # site 2 is too small to train
    assert fake.fed.server["dp"]["seen"].tolist() == [0.25, 0, 0, 0.25]


def test_who_is_asked_after_its_round_is_counted(tmp_path: Path) -> None:
    """FedFM may ask the clients of the round before for their anchors: whoever was in round 1 uploads in round 2 again. With place=local
    the server sees of every site what is published of it.
    """
    more = {"settings.anchors.clients": "previous", "settings.dp.place": "local", "rounds": 3, "model": "mlp"}
    fake = Fake(tmp_path, "fedfm+dp", participation=2, min_sites=1, **{**NOISY, **more})
    assert [r["cohort"] for r in fake.run()] == [["site-0", "site-3"], ["site-1", "site-2"], ["site-2", "site-3"]]
    for kind in ("spent", "seen"):                       # finish in rounds 1 and 3, and asked in round 2; site 1 is asked in round 3
        assert fake.fed.server["dp"][kind].tolist() == [0.5, 0.5, 0, 0.75]


def test_a_restarted_server_remembers_what_was_spent(tmp_path: Path) -> None:
    short, long = {**NOISY, "rounds": 1}, {**NOISY, "rounds": 3}
    Fake(tmp_path, "dp", **short).run()
    records = Fake(tmp_path, "dp", **long).run()
    assert [r["privacy"]["releases"] for r in records] == [1, 2, 3]
    assert records[-1]["privacy"]["epsilon"] == pytest.approx(epsilon_of(1.0, 1e-5))


def test_what_a_site_keeps_is_not_noised(tmp_path: Path) -> None:
    """Personal heads and the last trained model stay as trained: at lr ≈ 0 they are where they began, whatever was sent."""
    fake = Fake(tmp_path, "fedper+moon+dp", rounds=1, lr=1e-30, **{"settings.dp.noise": 3.0, "settings.dp.clip": 2.0})
    fake.run()
    fresh = fake.sites[0].fed.clients.fresh.tensors
    kept = fake.state(0)
    floats = [(k, t) for k, t in tree.paths({"local": kept["local"], "previous": kept["previous"]["params"]}) if t.is_floating_point()]
    start = dict(tree.paths({"local": fresh["local"], "previous": fresh["previous"]["params"]}))
    assert floats
    assert [k for k, t in floats if not torch.allclose(t, start[k], rtol=0, atol=1e-20) and "running" not in k] == []
