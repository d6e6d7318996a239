"""What `explain` and `run` say of privacy: sums and single uploads, raw averages, DBE's noise, (ε, δ)."""

from __future__ import annotations

import pytest

from consilience.privacy.accountant import epsilon_of
from consilience.runs.privacy import privacy_line

DATA = ("--data", "synthetic(samples=160, classes=3, clients=4, features=6)")
IMAGES = ("--data", "synthetic(samples=96, classes=3, clients=3, size=8)", "-o", "last_batch=keep")


def explained(cli, method, *more, data=DATA):
    return cli("explain", method, *data, *more, "--json").json()["privacy"]


def test_sums_and_single_uploads_are_told_apart(cli):
    said = explained(cli, "scaffold")
    assert said["model"]["sum"]
    assert said["uploads"] == [{"part": "scaffold", "upload": "change", "reduced": "mean", "sum": True}]
    assert said["secure_aggregation"] is None
    said = explained(cli, "fedfa", data=IMAGES)
    assert said["uploads"] == [{"part": "ffa", "upload": "stats", "reduced": "stack", "sum": False}]      # `left` only with bias_correct
    assert "the server reads ffa.stats client by client (stack)" in said["secure_aggregation"]
    text = cli("explain", "scaffold+fedfa", *IMAGES).out
    assert "change (mean; a sum: could go through secure aggregation)" in text
    assert "stats (stack; read client by client: cannot go through secure aggregation)" in text


@pytest.mark.parametrize(("method", "quick", "why"), [("fedgen", ("--set", "gen.steps=2"), "gen reads single clients' models"),
                                                       ("groupdro", (), "dro sets single clients' weights")])
def test_the_model_is_no_sum_where_the_server_looks_at_one(cli, method, quick, why):
    said = explained(cli, method, *quick)
    assert not said["model"]["sum"]
    assert why in said["model"]["why"]
    assert said["model"]["why"] in said["secure_aggregation"]


def test_settings_decide_what_is_uploaded(cli):
    assert explained(cli, "fedfm")["secure_aggregation"] is None
    assert "the server reads anchors.mean client by client (stack)" in explained(cli, "fedfm", "--set", "fedfm.aggregation=uniform")[
        "secure_aggregation"]
    assert explained(cli, "local")["model"] == {"travels": False, "sum": True, "why": "nothing of the model travels"}
    assert "  nothing\n" in cli("explain", "local", *DATA).out


def test_counters_are_no_sums_unless_they_stay(cli):
    model = ("--model", "resnet18")
    data = ("--data", "synthetic(samples=24, classes=3, clients=2, size=8)", "-o", "batch=4")
    assert "the largest is taken" in explained(cli, "fedavg", *model, data=data)["model"]["why"]
    assert explained(cli, "fedavg", *model, "-o", "batchnorm=params", data=data)["model"]["sum"]


def test_averages_of_raw_samples_carry_a_warning(cli):
    said = explained(cli, "fedbr")["raw_averages"]["debias"]
    assert said.startswith("means of 10 training inputs of one client, sent in every round")
    assert "before the first round" in explained(cli, "fedbr", "--set", "fedbr.refresh=once")["raw_averages"]["debias"]
    text = " ".join(cli("explain", "fedbr", *DATA).out.split())
    assert "raw data leave the client: means of 10 training inputs" in text
    assert "allow_raw_averages=true" in text
    assert explained(cli, "fedavg")["raw_averages"] == {}


def test_dbes_noise_says_what_it_does_not_protect(cli):
    plain = explained(cli, "dbe")["protects"]["mr"]
    assert "uploaded as it is, once, with the number of its samples" in plain
    noisy = explained(cli, "dbe", "--set", "dbe.noise_scale=0.5")["protects"]["mr"]
    assert "no (ε, δ) follows" in noisy
    assert "the number of samples and the models carry no noise" in noisy


def test_explain_forecasts_what_a_run_spends(cli):
    """Four clients, all answer: shares add up to z = 2, so Σ 1/z² is a quarter a round; FedFM looks before it trains, so twice that."""
    said = explained(cli, "fedavg+dp", "-o", "rounds=7", "--set", "dp.noise=2")["forecast"]
    assert said["rounds"] == said["releases"] == 7
    assert said["epsilon"] == pytest.approx(epsilon_of(7 / 4, 1e-5))
    said = explained(cli, "fedfm+dp", "-o", "rounds=7", "--set", "dp.noise=2")["forecast"]
    assert said["releases"] == 14
    assert said["epsilon"] == pytest.approx(epsilon_of(14 / 4, 1e-5))
    assert "after 7 rounds, if all answer: ε = " in " ".join(cli("explain", "fedavg+dp", *DATA, "-o", "rounds=7").out.split())
    assert explained(cli, "fedavg")["forecast"] is None


def test_a_run_records_epsilon_round_by_round_and_prints_the_last(cli):
    how = ("run", "dp", *DATA, "--rounds", "3", "--set", "dp.noise=2", "--set", "dp.clip=0.1", "--out", "here")
    document = cli(*how, "--json").json()
    spent = [r["privacy"]["epsilon"] for r in document["records"]]
    assert spent == pytest.approx([epsilon_of(t / 4, 1e-5) for t in (1, 2, 3)])
    assert document["summary"]["privacy"] == document["records"][-1]["privacy"]
    text = " ".join(cli(*how).out.split())
    assert f"Privacy: ε = {spent[-1]:.2f} at δ = 1e-05 for the client with most releases (3)" in text
    assert "noise keyed by the seed, so not secret: a simulation" in text
    assert "privacy" not in cli("run", "fedavg", *DATA, "--rounds", "1", "--out", "there", "--json").json()["records"][0]


def test_sampling_is_counted_for_cohorts_of_a_fixed_size(cli):
    document = cli("run", "dp", *DATA, "--rounds", "2", "--participation", "2", "--set", "dp.clip=0.1", "--out", "here", "--json").json()
    said = document["summary"]["privacy"]
    assert said["epsilon_sampled"] is not None
    assert "for whoever does not know which clients took part" in privacy_line(said)


def test_clipping_alone_claims_nothing(cli):
    text = cli("run", "dp", *DATA, "--rounds", "1", "--set", "dp.noise=0", "--out", "here").out
    assert "Privacy: no guarantee: uploads are clipped, but without noise." in text


def test_refusals_reach_the_user_in_words(cli):
    assert "only place=local protects those" in cli("run", "fedfa+dp", *IMAGES, code=2).err
    assert "dp needs weights=uniform" in cli("run", "fedavg+dp", *DATA, "-o", "weights=samples", code=2).err


def test_explain_warns_as_a_run_does(cli):
    """Four clients and a model of more than 400 numbers: the noise is at least √400/4 = 5 times as long as any change."""
    document = cli("explain", "fedavg+dp", *DATA, "--json").json()
    assert [line.partition(",")[0].partition(" times")[2] for line in document["warnings"]] == [" as long as the change it hides can be"]
    assert "warning dp adds noise" in " ".join(cli("explain", "fedavg+dp", *DATA).out.split())
    assert cli("explain", "fedavg", *DATA, "--json").json()["warnings"] == []


def test_noise_that_no_training_survives_is_explained_all_the_same(cli):
    """The three rounds that count bytes begin with one model; the noise of one was the start of the next, which left float32."""
    assert explained(cli, "fedavg+dp", "--set", "dp.noise=1e12")["secure_aggregation"] is None
