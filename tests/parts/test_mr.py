"""DBE's mean regularisation: running mean, gradient, and the mean agreed on before round one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consilience import rng, tree
from consilience.errors import ConfigError
from consilience.parts.mixup import Mixup
from consilience.parts.mr import Mr
from consilience.parts.prbm import Prbm
from consilience.parts.prox import Prox
from consilience.parts.rep import Rep
from consilience.testing import SIZES, run_tiny, tiny_federation, tiny_net

VARIANTS: list[dict[str, Any]] = [
    {}, {"momentum": 0.1}, {"momentum": 0.1, "bias_correct": True}, {"half": False}, {"init_mean": "running"}, {"init_epochs": 0},
    {"init_epochs": 2}, {"at": "stage1"}, {"at": "neck", "init_mean": "running", "momentum": 0.5}, {"noise_scale": 0.5, "noise_mix": 0.2}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Mr(**settings))


# ---- one step ------------------------------------------------------------------------------------------------------

def view(z: torch.Tensor, old: torch.Tensor, steps: float = 0.0, goal: Any = None) -> Any:
    shared = {"mean": torch.zeros(z.shape[1:]) if goal is None else torch.tensor(goal)}
    return SimpleNamespace(trace=SimpleNamespace(before={"f": z}), scratch={"mean": old, "steps": torch.tensor(steps)},
                           shared=shared, spec=SimpleNamespace(layout=SimpleNamespace(features="f")), once=lambda label, compute: compute())


def loss_of(part: Mr, v: Any) -> torch.Tensor:
    """As the step does: track first, then the loss on what was tracked."""
    v.scratch = part.track(v)
    return part.loss(v)


def test_running_mean_by_hand() -> None:
    """μ = 0.25, r = (4, 0), batch (0, 8), (8, 0) of mean (4, 4): r ← 0.75·(4, 0) + 0.25·(4, 4) = (4, 1)."""
    part = Mr(momentum=0.25)
    v = view(torch.tensor([[0.0, 8.0], [8.0, 0.0]]), torch.tensor([4.0, 0.0]), 3.0)
    after = part.track(v)
    assert after["mean"].tolist() == [4.0, 1.0]
    assert float(after["steps"]) == 4.0
    assert Mr(momentum=1.0).track(v)["mean"].tolist() == [4.0, 4.0]       # μ = 1: just this batch


def test_loss_by_hand() -> None:
    """r = (4, 1) as above, g = (1, 3): mean of (9, 4) is 6.5; κ = 10 and the half: 32.5, without the half 65."""
    z = torch.tensor([[0.0, 8.0], [8.0, 0.0]])
    for half, want in ((True, 32.5), (False, 65.0)):
        part = Mr(kappa=10.0, momentum=0.25, half=half)
        assert float(loss_of(part, view(z, torch.tensor([4.0, 0.0]), goal=[1.0, 3.0]))) == pytest.approx(want)


def test_gradient_by_hand() -> None:
    """∂/∂z_bk of κ·½·(1/K)Σ(r_k − g_k)², r = (1 − μ)r_old + μ·(1/B)Σ_b z_b, is κ·μ·(r_k − g_k)/(K·B).

    κ = 10, μ = 0.25, K = 2, B = 2, r − g = (3, −2): 10·0.25·(3, −2)/4 = (1.875, −1.25) for every sample. Twice that without the half.
    """
    for half, factor in ((True, 1.0), (False, 2.0)):
        z = torch.tensor([[0.0, 8.0], [8.0, 0.0]], requires_grad=True)
        loss = loss_of(Mr(kappa=10.0, momentum=0.25, half=half), view(z, torch.tensor([4.0, 0.0]), goal=[1.0, 3.0]))
        (grad,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(grad, factor * torch.tensor([[1.875, -1.25], [1.875, -1.25]]))


def test_bias_correction_by_hand() -> None:
    """From 0 with a constant batch mean m, r after n steps is (1 − (1 − μ)ⁿ)·m; divided by that factor it is m at every n."""
    part, m = Mr(momentum=0.1, bias_correct=True), torch.tensor([[2.0, -1.0]])
    v = view(m, torch.zeros(2), goal=[2.0, -1.0])
    plain = view(m, torch.zeros(2), goal=[2.0, -1.0])
    for n in range(1, 6):
        assert float(loss_of(part, v)) == pytest.approx(0.0, abs=1e-9)
        left = 0.9**n                                           # uncorrected: r − m = −0.9ⁿ·m
        assert float(loss_of(Mr(momentum=0.1), plain)) == pytest.approx(0.5 * left**2 * (4 + 1) / 2, rel=1e-4)


def test_running_mean_in_a_round(open_round: Any) -> None:
    """Step by step over a round, from 0; only the features before any tap count; the loss uses the mean with this step's batch."""
    opened = open_round(Mr(kappa=3.0, momentum=0.3), Prbm())
    goal, r = opened.fed.shared["mr"]["mean"], torch.zeros(12)
    for taken in opened.rest():
        z = taken.trace.before["head:input"].detach()
        r = 0.7 * r + 0.3 * z.mean(0)
        torch.testing.assert_close(taken.after["scratch"]["mr"]["mean"], r)
        assert float(taken.terms["mr"]) == pytest.approx(3.0 * 0.5 * float((r - goal).square().mean()), rel=1e-4)
    assert taken.after["personal"]["prbm"]["shift"].abs().sum() > 0            # the shift was there, and did not enter r


def test_gradient_reaches_the_features_scaled(open_round: Any) -> None:
    """In a real step: the header's bias is added to every feature, so its gradient from MR is Σ_b κμ(r − g)/(KB) = κμ(r − g)/K."""
    opened = open_round(Mr(kappa=20.0, momentum=0.5))
    mine, plain = opened.step(), open_round().step()
    r = 0.5 * mine.trace.before["head:input"].detach().mean(0)
    want = 20.0 * 0.5 * (r - opened.fed.shared["mr"]["mean"]) / 12
    torch.testing.assert_close(mine.grads["header.bias"] - plain.grads["header.bias"], want, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(mine.grads["head.weight"], plain.grads["head.weight"])       # nothing reaches the head


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.1, "bias_correct": True}], ids=str)
def test_fedrep_has_no_term_while_its_head_trains(open_round: Any, settings: dict[str, Any]) -> None:
    """The head's phase uploads nothing, so no mean is followed there and there is nothing to regularise; the base's phase has both."""
    for taken in open_round(Rep(), Mr(kappa=3.0, **settings)).rest():
        assert (float(taken.terms["mr"]) > 0) == (taken.phase.name == "base")
        assert taken.loss.isfinite()


def test_running_mean_starts_anew_every_round(open_round: Any) -> None:
    opened = open_round(Mr(momentum=0.1), rounds_before=1)
    assert torch.equal(opened.slot.scratch["mr"]["mean"], torch.zeros(12))
    assert float(opened.slot.scratch["mr"]["steps"]) == 0


# ---- the mean agreed on --------------------------------------------------------------------------------------------

def plain_epoch(fed: Any, number: int, epochs: int, mode: str, momentum: float = 1.0) -> torch.Tensor:
    """A client's mean after ordinary training with torch.optim.SGD on the same batches: by a pass, or the running mean."""
    net = tiny_net().train()
    policy = fed.policy
    opt = torch.optim.SGD(net.parameters(), policy.lr, momentum=policy.momentum, weight_decay=policy.weight_decay)
    rows = fed.samples.rows[number].train
    steps = len(rows) // policy.batch * epochs
    order = fed.samples.order(number, 0, [(fed.plain_phase, [policy.batch] * steps)]) if steps else []
    features = lambda x: net.header(net.neck(net.stage1(x)))  # type: ignore[operator]
    running = torch.zeros(12)
    for batch in order:
        z = features(fed.samples.x[batch])
        running = (1 - momentum) * running + momentum * z.detach().mean(0)
        opt.zero_grad()
        F.cross_entropy(net.head(z), fed.samples.y[batch]).backward()  # type: ignore[operator]
        opt.step()
    if mode == "running":
        return running
    with torch.no_grad():
        net.eval()
        return features(fed.samples.x[rows]).mean(0)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_mean_by_a_pass(epochs: int, weights: str) -> None:
    """g = Σ (n_i/n) z̄_i over all clients, by samples whatever the model's own weights are; client 2 makes no step but has data."""
    fed = tiny_federation([Mr(init_epochs=epochs)], weights=weights)
    fed.prepare()
    want = sum(n / sum(SIZES) * plain_epoch(fed, i, epochs, "pass") for i, n in enumerate(SIZES))
    torch.testing.assert_close(fed.shared["mr"]["mean"], want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_mean_as_the_release_takes_it(momentum: float) -> None:
    """The running mean at the end of the epoch: with μ = 1 the mean of the last batch. Client 2 makes no step, so it has no weight."""
    fed = tiny_federation([Mr(init_mean="running", momentum=momentum)])
    fed.prepare()
    own = {i: plain_epoch(fed, i, 1, "running", momentum) for i in (0, 1, 3)}
    total = sum(SIZES[i] for i in own)
    want = sum(SIZES[i] / total * mean for i, mean in own.items())
    torch.testing.assert_close(fed.shared["mr"]["mean"], want, rtol=1e-3, atol=1e-5)


def test_mean_is_taken_without_the_hosts_extras_and_leaves_the_model_alone() -> None:
    alone = tiny_federation([Mr()])
    initial = tree.clone(alone.model)
    alone.prepare()
    for partner in (Prbm(), Prox(mu=1.0)):
        both = tiny_federation([Mr(), partner])
        both.prepare()
        assert torch.equal(both.shared["mr"]["mean"], alone.shared["mr"]["mean"])
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(initial), tree.leaves(alone.model)))
    mixed = tiny_federation([Mr(), Mixup()])
    mixed.prepare()                                             # what defines the task acts in every training
    assert not torch.equal(mixed.shared["mr"]["mean"], alone.shared["mr"]["mean"])


def test_mean_is_agreed_once_by_all_clients_and_stays() -> None:
    """Even where two of four take part in a round. Up: one vector of 12 and a count for each client, before round one only."""
    fed = tiny_federation([Mr()], participation=2)
    report = fed.prepare()
    assert report.cohort == [0, 1, 2, 3]
    assert report.bytes_up == 4 * (12 + 1) * 4
    first = fed.shared["mr"]["mean"].clone()
    plain = tiny_federation(participation=2)
    for _ in range(2):
        assert fed.round().bytes_up == plain.round().bytes_up
    assert torch.equal(fed.shared["mr"]["mean"], first)


def test_noise_of_table_3() -> None:
    """z̄_i ← (1 − q)·z̄_i + ε_i with ε_i ~ N(0, s²), a draw of each client's own."""
    clean, noisy = tiny_federation([Mr()]), tiny_federation([Mr(noise_scale=0.5, noise_mix=0.2)])
    clean.prepare()
    noisy.prepare()
    draws = [rng.normal(rng.key(rng.key(0, "mr", "prepare", 0), i), (12,)) for i in range(4)]
    noise = sum(n / sum(SIZES) * 0.5 * e for n, e in zip(SIZES, draws))
    torch.testing.assert_close(noisy.shared["mr"]["mean"], 0.8 * clean.shared["mr"]["mean"] + noise, rtol=1e-4, atol=1e-5)
    assert len({float(e[0]) for e in draws}) == 4
    spread = torch.stack([rng.normal(rng.key(3, i), (12,)) for i in range(400)])
    assert float(spread.std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("at", "shape"), [("features", (12,)), ("neck", (12,)), ("stage1", (4, 4, 4))])
def test_any_point_of_the_model(open_round: Any, at: str, shape: tuple[int, ...]) -> None:
    """The mean is over the batch only, position by position; κ·½·mean over all entries."""
    opened = open_round(Mr(kappa=2.0, at=at))
    taken = opened.step()
    point = "head:input" if at == "features" else at
    r = taken.trace.before[point].detach().mean(0)
    assert r.shape == shape == opened.fed.shared["mr"]["mean"].shape
    want = 2.0 * 0.5 * float((r - opened.fed.shared["mr"]["mean"]).square().mean())
    assert float(taken.terms["mr"]) == pytest.approx(want, rel=1e-4)


def test_stronger_regularisation_brings_means_closer() -> None:
    """After two rounds the clients' batch means lie nearer to g at κ = 50 than at κ = 0."""
    def distance(kappa: float) -> float:
        fed = run_tiny([Mr(kappa=kappa)], rounds=3)
        z = fed.look(0, fed.client(0), fed.model, fed.samples.x[:24], False, False).before["head:input"].mean(0)
        return float((z - fed.shared["mr"]["mean"]).square().mean())
    assert distance(50.0) < distance(0.0)


def test_a_running_mean_needs_an_epoch() -> None:
    """init_epochs=0 trained one all the same."""
    with pytest.raises(ConfigError, match="needs an epoch for a running mean"):
        tiny_federation([Mr(init_mean="running", init_epochs=0)])
