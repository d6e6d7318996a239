"""A federation gives the bits of the simulation: every method, server and sites, model and state and scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_federation import CLASSES, SIZES, Fake, joined, simulate, unequal

from consilience.engines.flower.parcel import Refused
from consilience.engines.flower.scoring import read_scores, score_site
from consilience.errors import ConfigError
from consilience.parts.presets import PRESETS
from consilience.runs.measure import criterion_of_round
from consilience.runs.run import score_round

PAIRS = ("scaffold+dbe", "fedbr+fedfm", "moon+ditto", "fedrep+mr", "fedfa+mixup", "fedprox+fedbn", "fedfomo+mr", "lfd+groupdro",
         "feddyn+dbe", "dann+fedfm", "fedgen+fedprox", "fednova+fedfa")


@pytest.mark.parametrize("method", [*(name for name in PRESETS if name != "union"), *PAIRS])
def test_every_method_equals_the_simulation(method: str, tmp_path: Path) -> None:
    fake = Fake(tmp_path, method, rounds=2)
    records = fake.run()
    assert not unequal(fake, simulate(fake.settings))
    assert records[-1]["round"] == 2
    assert records[-1]["idle"] == ["site-2"]
    assert not records[-1]["lost"]


@pytest.mark.parametrize(("method", "settings"), [
    ("fedavg", {"participation": 2, "rounds": 4}),                                # a keyed draw of two sites
    ("fedfm", {"settings.anchors.lite": True, "settings.anchors.every": 2, "settings.anchors.start": 1, "rounds": 5}),   # models rest
    ("fedfm", {"settings.anchors.clients": "previous", "participation": 2, "rounds": 4}),        # others are asked than train
    ("fedbr", {"settings.debias.refresh": "once"}),
    ("fedmix", {"settings.mix.refresh": "round", "participation": 2, "rounds": 3}),
    ("moon", {"optimiser_state": "kept", "momentum": 0.9}),
    ("fedavg", {"optimiser": "adam", "batchnorm": "params", "last_batch": "keep", "schedule": "exponential(gamma=0.9)"}),
    ("fedavg", {"layout": "channels_last"}),
    ("fedavg", {"weights": "uniform", "steps": 2, "sampling": "replacement", "seed": 11}),
], ids=["participation", "lite", "previous", "once", "anew", "kept", "policies", "channels_last", "replacement"])
def test_policies_equal_the_simulation(method: str, settings: dict, tmp_path: Path) -> None:
    fake = Fake(tmp_path, method, **settings)
    fake.run()
    assert not unequal(fake, simulate(fake.settings))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "dbe", "fedbabu", "local"])
def test_scores_pool_to_the_simulation_s(method: str, tmp_path: Path) -> None:
    """Sites score their rows by themselves, so that batches differ from the simulation's; sums of floats differ in the last digits."""
    fake = Fake(tmp_path, method, rounds=2)
    found = fake.run()[-1]
    fed = simulate(fake.settings)
    expected = score_round(fed, joined(fake.settings))
    for which in ("global", "personalised"):
        if expected[which] is None:
            assert found[which] is None
            assert found["no_global_model"] == expected["no_global_model"]
            continue
        assert found[which]["accuracy"] == pytest.approx(expected[which]["accuracy"], abs=1e-9)
        assert found[which]["per_client"] == pytest.approx(expected[which]["per_client"], abs=1e-9)
        assert found[which]["loss"] == pytest.approx(expected[which]["loss"], rel=1e-5)
        assert found[which]["worst_client"] == expected[which]["worst_client"]
        assert found[which]["scored"] == expected[which]["scored"]
    assert found["validation"]["accuracy"] == pytest.approx(expected["validation"]["accuracy"], abs=1e-9)


@pytest.mark.parametrize(("method", "criterion"), [("fedavg", "auroc"), ("dbe", "balanced_accuracy"), ("local", "f1(positive=c)")])
def test_sites_score_by_the_criterion_as_the_simulation_s_clients(method: str, criterion: str, tmp_path: Path) -> None:
    """Together it is the mean over sites by their rows: 7, 4, 1 and 12 test rows; a site without the class, or with one class, has none."""
    fake = Fake(tmp_path, method, rounds=1, criterion=criterion, class_names="a,b,c")
    found = fake.run()[-1]["criterion"]
    data = replace(joined(fake.settings), description={"class_names": ["a", "b", "c"]})
    expected = criterion_of_round(simulate(fake.settings), data, criterion)
    rows = {f"site-{i}": len(c.test) for i, c in enumerate(data.clients)}
    for which in ("global", "personalised"):
        if expected[which] is None:
            assert found[which] is None
            continue
        each = expected[which]["per_client"]
        assert found[which]["per_client"] == pytest.approx(each, abs=1e-6)
        assert found[which]["value"] == pytest.approx(sum(each[s] * rows[s] for s in each) / sum(rows[s] for s in each), abs=1e-6)
        assert found[which]["worst_client"] == expected[which]["worst_client"]
    assert found["measure"] == criterion
    assert ("positive is class c" in found["personalised"]["scored"]) == ("positive" in criterion)


def test_a_site_asks_its_models_once_for_accuracy_and_criterion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, "dbe", criterion="auroc")
    site, asked, look = fake.sites[0], [], type(fake.sites[0].fed).look
    monkeypatch.setattr(type(site.fed), "look", lambda fed, *given: asked.append(len(given[3])) or look(fed, *given))
    judged = score_site(site.fed, 0, site.rows, fake.settings.judge[0])
    once, asked[:] = sum(asked), []
    plain = score_site(site.fed, 0, site.rows)
    assert once == sum(asked) > 0
    assert {m: {r: {k: v for k, v in s.items() if k != "criterion"} for r, s in rows.items()} for m, rows in judged.items()} == plain


def test_a_criterion_that_is_none_or_no_share_is_refused(tmp_path: Path) -> None:
    for wrong, said in (("drift", "cannot be judged by 'drift'"), ("f1(positive=z)", "no class 'z'"), ("auroc(rows=test)", "without rows"),
                        ("auroc(training=after)", "without rows or training")):
        with pytest.raises(ConfigError, match=said):
            Fake(tmp_path, criterion=wrong)
    fake = Fake(tmp_path / "a", criterion="auroc")
    site = fake.sites[0]
    scores = score_site(site.fed, 0, site.rows, fake.settings.judge[0])
    assert read_scores({"scores": scores}, site.fed, site.sizes, True) == scores
    for value in (1.5, -0.1, float("nan"), "0.5"):
        scores["global"]["test"]["criterion"] = value
        with pytest.raises(Refused):
            read_scores({"scores": scores}, site.fed, site.sizes, True)
    with pytest.raises(Refused, match="not those asked for"):                   # a site of an older version sends none, or one unasked
        read_scores({"scores": score_site(site.fed, 0, site.rows)}, site.fed, site.sizes, True)
    assert fake.settings.digest() != Fake(tmp_path / "b").settings.digest() == Fake(tmp_path / "c", criterion="accuracy").settings.digest()


def test_bytes_are_counted_as_in_simulation(tmp_path: Path) -> None:
    fake = Fake(tmp_path, "scaffold+dbe", rounds=2)
    records = fake.run()
    fed = simulate(fake.settings, [])       # prepared and trained anew, to see its reports
    again = type(fed)(*fed.made_of, engine=type(fed.engine))
    reports = [again.prepare(), again.round(), again.round()]
    assert [(r["bytes_up"], r["bytes_down"]) for r in records] == [(r.bytes_up, r.bytes_down) for r in reports]


def test_what_cannot_run_in_a_federation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pooled data"):
        Fake(tmp_path, "union")
    with pytest.raises(ConfigError, match="fail by themselves"):
        Fake(tmp_path, "fedavg", dropout=0.1)
    with pytest.raises(ConfigError, match="allow_raw_averages=true"):
        Fake(tmp_path, "fedbr", allow_raw_averages=False)
    for method in ("fedmix", "naivemix"):
        with pytest.raises(ConfigError, match=r"means of 10 training inputs .* and of their labels.*allow_raw_averages=true"):
            Fake(tmp_path, method, allow_raw_averages=False)


def test_nothing_personal_is_in_any_answer(tmp_path: Path) -> None:
    """What leaves a site: declared uploads, moving keys of the model, numbers. Checked name by name on the wire."""
    seen: dict[str, set[str]] = {}

    def listen(site, request, work):
        answer = work()
        seen.setdefault(request.about["task"], set()).update([*answer.arrays, *answer.about])
        return answer
    fake = Fake(tmp_path, "scaffold+fedper+mr", listen, rounds=2)
    fake.run()
    moving = {f"model/{k}" for k in fake.fed.moving}
    head = {k for k in fake.fed.model["params"] if fake.fed.spec.in_head(k)}
    envelope = {"federation", "task", "round", "site", "sizes", "seconds"}
    assert head
    assert not {f"model/{k}" for k in head} & moving
    uploads = {name for name in seen["train"] if name.startswith("uploads/scaffold/")}
    assert seen["train"] - envelope == {"loss"} | moving | uploads
    assert not [name for name in uploads if any(name.endswith("/" + k) for k in head)]
    assert seen["consult"] - envelope == {"total", "count"}
    assert seen["score"] - envelope == {"scores"}
    assert seen["hello"] - envelope == {"name", "declaration", "version"}


def test_a_run_with_more_rounds_goes_on(tmp_path: Path) -> None:
    Fake(tmp_path, "scaffold", rounds=1).run()
    longer = Fake(tmp_path, "scaffold", rounds=3)
    records = longer.run()
    assert [r["round"] for r in records] == [1, 2, 3]
    assert not unequal(longer, simulate(longer.settings))
    assert torch.equal(torch.tensor(SIZES), torch.tensor(longer.fed.samples.rows.table.sizes.tolist()))
    assert longer.fed.population.classes == CLASSES


def test_reports_are_made_from_the_server_s_folder(tmp_path: Path) -> None:
    """Its files have the form of a simulation's."""
    from consilience.report.report import write_report
    Fake(tmp_path, "dbe", rounds=2).run()
    page = write_report([tmp_path / "server"], tmp_path / "page.html").read_text()
    assert "dbe" in page
    assert "site-3" in page
