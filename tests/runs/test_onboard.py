"""A new client's personal model by each method's own rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score

import consilience
from consilience.engines import Sequential
from consilience.errors import ConfigError, DataError
from consilience.runs.export import load_exported
from consilience.runs.onboard import NEW, onboard
from consilience.runs.reload import open_run

SOURCE = "synthetic(samples=160, classes=3, clients=4, features=6)"


def flat(model) -> dict[str, torch.Tensor]:
    return {**model["params"], **model["buffers"]}


def test_fedavg_fine_tunes_the_whole_model(trained):
    """Against a plain loop of SGD over the same batches, from the global model."""
    run = open_run(trained("fedavg"))
    done = onboard(trained("fedavg"), SOURCE, epochs=2)
    fed, number = done.model.federation, 4
    weights = {k: v.clone().requires_grad_() for k, v in run.federation.model["params"].items()}
    for rows in fed.samples.order(number, fed.round_number, fed.samples.schedule(number, fed.phases)):
        loss = F.cross_entropy(fed.program.network.forward({"params": weights, "buffers": {}}, fed.samples.x[rows], train=True).logits,
                               fed.samples.y[rows])
        grads = torch.autograd.grad(loss, list(weights.values()))
        weights = {k: (w - 0.1 * g).detach().requires_grad_() for (k, w), g in zip(weights.items(), grads)}
    for k, v in done.model.model["params"].items():
        torch.testing.assert_close(v, weights[k].detach())
    assert done.report["samples"] == {"train": 120, "held_out": 40}
    assert done.report["lr"] == 0.1


def test_a_client_trains_on_one_thread_whatever_the_machine_has(trained, monkeypatch):
    """Threads add up in another order, which showed in the third digit of an accuracy."""
    before, seen = torch.get_num_threads(), []
    run = Sequential.run
    monkeypatch.setattr(Sequential, "run", lambda self, work: seen.append(torch.get_num_threads()) or run(self, work))
    torch.set_num_threads(3)
    try:
        onboard(trained("fedavg"), SOURCE, epochs=1)
        assert (set(seen), torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_dbe_starts_at_zero_and_pulls_to_the_stored_mean(trained, tmp_path):
    run = open_run(trained("dbe"))
    done = onboard(trained("dbe"), SOURCE, epochs=2)
    assert torch.equal(done.model.federation.shared["mr"]["mean"], run.federation.shared["mr"]["mean"])
    shift = done.model.state.tensors["personal"]["prbm"]["shift"]
    assert bool(shift.abs().sum() > 0)
    card = done.write(tmp_path / "p.safetensors")
    assert card["client"] == NEW
    assert list(card["personal"]["tensors"]) == ["prbm/shift"]
    loaded = load_exported(tmp_path / "p.safetensors")
    assert torch.equal(loaded(run.data.x[:9]), done.model.logits(run.data.x[:9]))
    # before: the global model alone, since the shift is 0
    held = sorted(set(range(160)) - set(done.model.federation.samples.rows[4].train.tolist()))
    right = (run.federation.program.network.forward(run.federation.model, run.data.x[held]).logits.argmax(1) == run.data.y[held])
    assert done.report["before"]["accuracy"] == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize("method", ["fedper", "fedrep+mr", "fedper+scaffold"])
def test_with_a_local_head_only_the_head_is_trained(trained, method):
    run = open_run(trained(method))
    done = onboard(trained(method), SOURCE, epochs=1)
    for k, v in done.model.model["params"].items():
        assert torch.equal(v, run.federation.model["params"][k]) != k.startswith("head."), k
    assert "only what stays on a client" in done.report["rule"]


def test_fedbabu_tunes_the_head_too(trained):
    run = open_run(trained("fedbabu"))
    done = onboard(trained("fedbabu"), SOURCE, epochs=1)
    assert all(not torch.equal(v, run.federation.model["params"][k]) for k, v in done.model.model["params"].items())
    assert "fine-tuned" in done.report["rule"]


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_a_second_model_begins_at_the_global_one(trained, method):
    """With no step to speak of the personal model is the global one, not the initial one."""
    run = open_run(trained(method))
    done = onboard(trained(method), SOURCE, epochs=1, lr=1e-12)
    for k, v in done.model.model["params"].items():
        torch.testing.assert_close(v, run.federation.model["params"][k])
    assert "local training as in a round" in done.report["rule"]


def test_pfedme_trains_a_model_of_its_own_near_the_global_one(trained):
    """Its local training as in a round, not plain fine-tuning; the personal model is the one served."""
    run = open_run(trained("pfedme"))
    done = onboard(trained("pfedme"), SOURCE, epochs=1)
    assert done.report["rule"].startswith("local training as in a round")
    own = done.model.state.tensors["kept"]["moreau"]["model"]["params"]
    for k, v in done.model.model["params"].items():
        assert torch.equal(v, own[k])
        assert not torch.equal(v, run.federation.model["params"][k])


def test_methods_without_a_global_model(trained):
    assert "initial model" in onboard(trained("local"), SOURCE, epochs=1).report["start"]
    report = onboard(trained("fedfomo"), SOURCE, epochs=1).report
    assert "mixture of the clients' models" in report["rule"]
    assert report["start"] == "the initial model, since there is no global one"         # models do travel: the mixture is of them


def test_apple_learns_weights_of_the_others_cores_alone(trained):
    """Someone new has no share of the samples, so that its own core has no part in its mixture."""
    done = onboard(trained("apple"), SOURCE, epochs=1)
    share = done.model.federation.shared["apple"]["share"]
    p = done.model.state.tensors["kept"]["apple"]["p"]
    assert (share[-1], p.shape) == (0.0, share.shape)
    assert not torch.equal(p, share)
    cores = done.model.federation.server["apple"]["cores"]
    for k, v in done.model.model["params"].items():
        torch.testing.assert_close(v, torch.tensordot(p[:-1], cores[k][:-1], 1) + p[-1] * done.model.state.tensors["local"][k])


@pytest.mark.parametrize("method", ["union", "dann", "fedfm", "lfd", "scaffold+dbe"])
def test_other_methods_learn_what_the_run_did_not_know(trained, method):
    """A client whose classes lie elsewhere: the global model guesses, the personal one does not."""
    report = onboard(trained(method), SOURCE.replace(")", ", seed=5)"), epochs=10).report
    assert report["after"]["accuracy"] > report["before"]["accuracy"] + 0.3


def test_fedbn_starts_from_averaged_normalisation(tmp_path):
    images = "synthetic(samples=90, classes=3, clients=3, size=8)"
    consilience.run("fedbn", images, model="digits_cnn", rounds=2, lr=0.05, out=tmp_path / "r")
    run = open_run(tmp_path / "r")
    done = onboard(tmp_path / "r", images, epochs=1, lr=1e-12)
    key = next(k for k in run.federation.spec.norm if k.endswith("weight"))
    mean = torch.stack([run.federation.client(i).tensors["local"][key].double() for i in range(3)]).mean(0)
    torch.testing.assert_close(flat(done.model.model)[key].double(), mean, atol=1e-6, rtol=1e-6)
    assert "averaged" in done.report["start"]


def test_nothing_of_the_run_changes_and_nothing_is_aggregated(trained):
    at = trained("scaffold+dbe")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in at.rglob("*") if p.is_file()}
    run = open_run(at)
    one, two = (onboard(at, SOURCE, epochs=2) for _ in range(2))
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in at.rglob("*") if p.is_file()} == before
    for k, v in one.model.federation.model["params"].items():
        assert torch.equal(v, run.federation.model["params"][k])
    assert one.report == two.report
    assert all(torch.equal(v, two.model.model["params"][k]) for k, v in one.model.model["params"].items())


def test_a_run_that_ended_with_a_small_rate_goes_on_with_it(tmp_path, tiny):
    consilience.run("fedavg", out=tmp_path / "r", **tiny, schedule="step(every=2, gamma=0.1)")
    assert onboard(tmp_path / "r", SOURCE, epochs=1).report["lr"] == pytest.approx(0.1 * 0.1)       # round 3
    assert onboard(tmp_path / "r", SOURCE, epochs=1, lr=0.3).report["lr"] == 0.3


def test_refusals(trained, tmp_path):
    at = trained("dbe")
    with pytest.raises(ConfigError, match="epochs"):
        onboard(at, SOURCE, epochs=0)
    with pytest.raises(ConfigError, match="train"):
        onboard(at, SOURCE, train=0)
    np.savez(tmp_path / "few.npz", x=np.zeros((8, 6), np.float32), y=np.arange(8) % 3)
    few = f"arrays(path='{tmp_path / 'few.npz'}', classes=3)"
    with pytest.raises(DataError, match=r"new client has 6 samples to train on, fewer than a batch of 10.*larger --train"):
        onboard(at, few)
    with pytest.raises(DataError, match="new client has 5 samples to train on, fewer than a batch of 10"):
        onboard(trained("fedfomo"), few)                                      # which holds a fifth of six back
    np.savez(tmp_path / "more.npz", x=np.zeros((40, 6), np.float32), y=np.arange(40) % 5)
    with pytest.raises(DataError, match="classes that the run does not know: 3, 4"):
        onboard(at, f"arrays(path='{tmp_path / 'more.npz'}')")


def test_a_run_s_criterion_scores_the_new_client_too(trained, tiny, tmp_path):
    """Balanced accuracy is the mean of the classes' recalls, here by scikit-learn on the rows held out; accuracy stands beside it."""
    consilience.run("fedavg", out=tmp_path / "run", criterion="balanced_accuracy", **tiny)
    done = onboard(tmp_path / "run", SOURCE, epochs=1)
    assert done.report["criterion"] == "balanced_accuracy"
    fed = done.model.federation
    held = [i for i in range(160) if i not in set(fed.samples.rows[4].train.tolist())]
    x, y = fed.samples.inputs(torch.tensor(held))
    wanted = balanced_accuracy_score(y, done.model.logits(x).argmax(1))
    assert done.report["after"]["criterion"] == pytest.approx(wanted)
    assert done.report["after"]["accuracy"] != pytest.approx(wanted)
    plain = onboard(trained("fedavg"), SOURCE, epochs=1).report
    assert plain["criterion"] == "accuracy"
    assert "criterion" not in plain["after"]
