"""FedFA's layer and server, against numbers worked out by hand and a second, plain implementation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError
from consilience.parts.ffa import Ffa
from consilience.testing import run_tiny, tiny_federation, tiny_population

EPS = 1e-6

VARIANTS: list[dict[str, Any]] = [
    {}, {"p": 0.5}, {"p": 1.0, "momentum": 0.0}, {"p": 1.0, "stages": (1,)}, {"p": 1.0, "unbiased": False},
    {"p": 1.0, "bias_correct": True}, {"p": 1.0, "stats": "reset"}, {"p": 1.0, "stats": "averaged"},
    {"p": 1.0, "stats": "averaged", "bias_correct": True},
    *({"p": 1.0, "sharing": s} for s in ("per_channel", "scalar", "direct", "none", "random"))]


def view_of(over: Any, seed: int) -> Any:
    """What the layer reads at point q: variances over clients, momentum statistics at their start, a key."""
    start = {"mean": torch.zeros_like(over["mean"]), "std": torch.ones_like(over["std"])}
    return SimpleNamespace(train=True, shared={"variance": {"q": over}}, key=lambda *w: rng.key(seed, *w),
                           scratch={"stats": {"q": start}, "left": {"q": torch.ones(())}})


def tossed(taken: Any, point: str) -> bool:
    """Whether the coin said yes: only then does less of the start remain."""
    return bool(taken.after["scratch"]["ffa"]["left"][point] < taken.before["scratch"]["ffa"]["left"][point])


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains_and_can_be_captured(trains_and_replays: Any, settings: dict[str, Any]) -> None:
    trains_and_replays(Ffa(**settings))


# ---- the layer -----------------------------------------------------------------------------------------------------

def reference(x: np.ndarray, over_mean: np.ndarray, over_std: np.ndarray, noise: np.ndarray, sharing: str, ddof: int) -> np.ndarray:
    """The layer in plain NumPy, sample by sample and channel by channel (METHODS.md 4.1)."""
    batch, channels = x.shape[:2]
    mu = np.array([[x[b, c].mean() for c in range(channels)] for b in range(batch)])
    sigma = np.array([[math.sqrt(x[b, c].var(ddof=ddof) + EPS) for c in range(channels)] for b in range(batch)])

    def spread(statistic: np.ndarray, over_clients: np.ndarray) -> np.ndarray:
        v = np.array([statistic[:, c].var(ddof=ddof) + EPS for c in range(channels)])
        if sharing == "random":
            return np.full(channels, 0.5)
        if sharing == "none":
            return np.sqrt(v)
        if sharing == "direct":
            return np.sqrt((over_clients + 1) * v)
        r = (over_clients + EPS) / (1 + over_clients + EPS)          # r = v/(1 + v), the same as 1/(1 + 1/v)
        gamma = channels * r / r.sum()
        return np.sqrt((gamma + 1) * v)
    s_mu, s_sigma = spread(mu, over_mean), spread(sigma, over_std)
    out = np.empty_like(x)
    for b in range(batch):
        for c in range(channels):
            new_sigma = sigma[b, c] + noise[1, b, c] * s_sigma[c]
            new_mu = mu[b, c] + noise[0, b, c] * s_mu[c]
            out[b, c] = new_sigma * (x[b, c] - mu[b, c]) / sigma[b, c] + new_mu
    return out


OVER_MEAN, OVER_STD = torch.tensor([0.1, 1.0, 3.0, 0.0]), torch.tensor([2.0, 0.5, 0.25, 1.0])


def set_variance(opened: Any) -> None:
    opened.slot.shared["ffa"]["variance"]["stage1"]["mean"].copy_(OVER_MEAN)
    opened.slot.shared["ffa"]["variance"]["stage1"]["std"].copy_(OVER_STD)


def noise_in(x: torch.Tensor, jittered: torch.Tensor, ddof: int = 1) -> torch.Tensor:
    """The noise ε_μ, ε_σ behind maps jittered with sharing=random, whose Σ̂ is ½: X̂ = (σ + ½ε_σ)X̄ + μ + ½ε_μ and X̄ has mean 0.

    Draws depend on the key alone, so the same step shows the same noise under every sharing.
    """
    x, jittered = x.double(), jittered.double()
    mu = x.mean((2, 3))
    sigma = (x.var((2, 3), correction=ddof) + EPS).sqrt()
    normalised = (x - mu[..., None, None]) / sigma[..., None, None]
    square = normalised.square().sum((2, 3))
    slope = (jittered * normalised).sum((2, 3)) / square.clamp(min=1e-9)
    e_sigma = torch.where(square > 1e-6, 2 * (slope - sigma), 0.0)            # a constant map shows no ε_σ
    return torch.stack([2 * (jittered.mean((2, 3)) - mu), e_sigma]).float()


def noise_of_first_step(open_round: Any, unbiased: bool = True) -> torch.Tensor:
    trace = open_round(Ffa(p=1.0, sharing="random", unbiased=unbiased)).step().trace
    return noise_in(trace.before["stage1"].detach(), trace.after["stage1"].detach(), int(unbiased))


def test_noise_is_standard_normal_for_every_sample_channel_and_statistic(open_round: Any) -> None:
    """6 steps × 8 samples × 4 channels of each statistic: mean 0 ± 0.25 and deviation 1 ± 0.15, uncorrelated with each other."""
    drawn = []
    for taken in open_round(Ffa(p=1.0, sharing="random")).rest():
        drawn.append(noise_in(taken.trace.before["stage1"].detach(), taken.trace.after["stage1"].detach()))
    noise = torch.cat(drawn, 1)                                       # statistic × samples × channels
    assert noise.shape == (2, 48, 4)
    assert float(noise.mean((1, 2)).abs().max()) < 0.25
    assert float((noise.std((1, 2)) - 1).abs().max()) < 0.15
    assert float(torch.corrcoef(noise.flatten(1))[0, 1].abs()) < 0.25
    assert len(set(noise[0].flatten().tolist())) == 48 * 4


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("sharing", ["per_channel", "scalar", "direct", "none", "random"])
def test_layer_equals_the_reference(open_round: Any, sharing: str, unbiased: bool) -> None:
    opened = open_round(Ffa(p=1.0, sharing=sharing, unbiased=unbiased))
    set_variance(opened)
    taken = opened.step()
    x = taken.trace.before["stage1"].detach()
    noise = noise_of_first_step(open_round, unbiased).numpy()
    want = reference(x.numpy(), OVER_MEAN.numpy(), OVER_STD.numpy(), noise, sharing, int(unbiased))
    torch.testing.assert_close(taken.trace.after["stage1"].detach(), torch.from_numpy(want), rtol=1e-3, atol=1e-4)


def test_gamma_by_hand() -> None:
    """v over clients = (1/3, 1, 3): r = v/(1 + v) = (1/4, 1/2, 3/4), Σr = 3/2, γ = 3·r/Σr = (1/2, 1, 3/2).

    With V = (2, 2, 2): Σ̂² = (γ + 1)·V = (3, 4, 5).
    """
    over, v = torch.tensor([1 / 3, 1.0, 3.0]), torch.full((3,), 2.0)
    torch.testing.assert_close(Ffa()._spread(v, over).square(), torch.tensor([3.0, 4.0, 5.0]), rtol=1e-5, atol=1e-5)
    # γ = 1 in every channel where all variances are equal, as in the release: Σ̂² = 2V
    torch.testing.assert_close(Ffa(sharing="scalar")._spread(v, torch.full((3,), 0.7)).square(), 2 * v)
    torch.testing.assert_close(Ffa(sharing="none")._spread(v, over).square(), v)                     # FedFA-C
    torch.testing.assert_close(Ffa(sharing="direct")._spread(v, over).square(), torch.tensor([8 / 3, 4.0, 8.0]))
    torch.testing.assert_close(Ffa(sharing="random")._spread(v, over), torch.full((3,), 0.5))        # FedFA-R


@pytest.mark.parametrize(("unbiased", "v_mean"), [(True, 2.0), (False, 1.0)])
def test_variances_by_hand(unbiased: bool, v_mean: float) -> None:
    """Two samples, one channel, two positions: X = [[1, 3], [3, 5]], so μ = (2, 4) and the spread inside each is ±1.

    var over positions: ((−1)² + 1²)/(2 − 1) = 2 unbiased, 1 biased, so σ = √2 or 1 for both samples, and V_σ = 0 (+ ε).
    var of μ over the batch: 2 unbiased, 1 biased. With sharing=none, Σ̂_μ = √(V_μ + ε), and ε_σΣ̂_σ is 1e-3·noise.
    """
    x = torch.tensor([[[[1.0, 3.0]]], [[[3.0, 5.0]]]])
    part = Ffa(p=1.0, sharing="none", unbiased=unbiased, momentum=0.0)        # so that the statistics become those of this step
    ones = {"mean": torch.ones(1), "std": torch.ones(1)}
    view = view_of(ones, 5)
    out, notes = part.tap(view, "q", x)
    e_mu, e_sigma = noise_in(x, Ffa(p=1.0, sharing="random", unbiased=unbiased).tap(view, "q", x)[0], int(unbiased))[:, :, 0]
    sigma = math.sqrt(v_mean + EPS)
    root_v = math.sqrt(v_mean + EPS)
    for b, mu in enumerate((2.0, 4.0)):
        for position, normalised in enumerate((-1 / sigma, 1 / sigma)):
            want = (sigma + e_sigma[b] * math.sqrt(EPS)) * normalised + mu + e_mu[b] * root_v
            assert float(out[b, 0, 0, position]) == pytest.approx(float(want), rel=1e-4)
    assert float(notes["stats"]["mean"]) == 3.0                               # mean over the batch of μ
    assert float(notes["stats"]["std"]) == pytest.approx(sigma)


@pytest.mark.parametrize("sharing", ["per_channel", "direct", "random"])
def test_lemma_1_the_jitter_is_noise_on_normalised_features(open_round: Any, sharing: str) -> None:
    """X̂ − X = ε_σ Σ̂_σ·X̄ + ε_μ Σ̂_μ, X̄ the normalised feature. Follows from X = σX̄ + μ and X̂ = σ̂X̄ + μ̂."""
    opened = open_round(Ffa(p=1.0, sharing=sharing))
    set_variance(opened)
    taken = opened.step()
    x, jittered = taken.trace.before["stage1"].detach(), taken.trace.after["stage1"].detach()
    mu = x.mean((2, 3))
    sigma = (x.var((2, 3)) + EPS).sqrt()
    normalised = (x - mu[:, :, None, None]) / sigma[:, :, None, None]
    e_mu, e_sigma = noise_of_first_step(open_round)
    v_mu, v_sigma = mu.var(0) + EPS, sigma.var(0) + EPS

    def spread(v: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
        if sharing == "random":
            return torch.full_like(v, 0.5)
        if sharing == "direct":
            return torch.sqrt((over + 1) * v)
        r = (over + EPS) / (1 + over + EPS)
        return torch.sqrt((4 * r / r.sum() + 1) * v)
    noise = (e_sigma * spread(v_sigma, OVER_STD))[:, :, None, None] * normalised + (e_mu * spread(v_mu, OVER_MEAN))[:, :, None, None]
    assert noise.abs().max() > 0.01
    torch.testing.assert_close(jittered - x, noise, rtol=1e-3, atol=1e-4)


def test_gradients_flow_through_the_statistics(open_round: Any) -> None:
    """Nothing in the layer is detached: its gradient is that of the plain formula, differentiated by torch."""
    x = rng.normal(rng.key(1, "x"), (6, 3, 2, 2)).requires_grad_()
    view = view_of({"mean": torch.tensor([0.5, 1.0, 2.0]), "std": torch.tensor([1.0, 0.1, 0.2])}, 2)
    weight = rng.normal(rng.key(1, "w"), (6, 3, 2, 2))
    (mine,) = torch.autograd.grad((Ffa(p=1.0, sharing="none").tap(view, "q", x)[0] * weight).sum(), x)
    noise = noise_in(x.detach(), Ffa(p=1.0, sharing="random").tap(view, "q", x.detach())[0])
    mu = x.mean((2, 3), keepdim=True)
    sigma = (x.var((2, 3), keepdim=True) + EPS).sqrt()
    new_mu = mu + noise[0][..., None, None] * (mu.var(0, keepdim=True) + EPS).sqrt()
    new_sigma = sigma + noise[1][..., None, None] * (sigma.var(0, keepdim=True) + EPS).sqrt()
    (plain,) = torch.autograd.grad(((new_sigma * (x - mu) / sigma + new_mu) * weight).sum(), x, retain_graph=True)
    torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4)
    (held,) = torch.autograd.grad(((new_sigma.detach() * (x - mu) / sigma + new_mu.detach()) * weight).sum(), x)
    assert not torch.allclose(mine, held, rtol=1e-2, atol=1e-3)


def test_evaluation_is_the_identity() -> None:
    fed = tiny_federation([Ffa(p=1.0)])
    x, state = fed.samples.x[:4], fed.client(0)
    trace = fed.look(0, state, fed.model, x, False, True)
    assert torch.equal(trace.before["stage1"], trace.after["stage1"])
    assert torch.equal(trace.logits, fed.look(0, state, fed.model, x, False, False).logits)


# ---- momentum statistics -------------------------------------------------------------------------------------------

def test_momentum_statistics_by_hand(open_round: Any) -> None:
    """From (0, 1), α = 0.9, coin always on: after n steps m_n = 0.9 m + 0.1 mean_b μ, the same for σ; 0.9ⁿ of the start is left."""
    opened = open_round(Ffa(p=1.0, momentum=0.9))
    mean, std = np.zeros(4), np.ones(4)
    steps = opened.rest()
    for taken in steps:
        x = taken.trace.before["stage1"].detach().numpy()
        mean = 0.9 * mean + 0.1 * x.mean((2, 3)).mean(0)
        std = 0.9 * std + 0.1 * np.sqrt(x.var((2, 3), ddof=1) + EPS).mean(0)
    got = steps[-1].after["scratch"]["ffa"]
    torch.testing.assert_close(got["stats"]["stage1"]["mean"], torch.tensor(mean, dtype=torch.float32), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got["stats"]["stage1"]["std"], torch.tensor(std, dtype=torch.float32), rtol=1e-4, atol=1e-6)
    assert float(got["left"]["stage1"]) == pytest.approx(0.9 ** len(steps))


def test_coin_off_leaves_features_and_statistics_alone(open_round: Any) -> None:
    coins = set()
    for taken in open_round(Ffa(p=0.5), epochs=4).rest():
        on = tossed(taken, "stage1")
        coins.add(on)
        same_map = torch.equal(taken.trace.before["stage1"], taken.trace.after["stage1"])
        old, new = (s["scratch"]["ffa"]["stats"]["stage1"] for s in (taken.before, taken.after))
        same_stats = torch.equal(old["mean"], new["mean"]) and torch.equal(old["std"], new["std"])
        assert same_map == same_stats == (not on)
    assert coins == {True, False}


def test_kept_statistics_go_on_where_they_stopped() -> None:
    fed = tiny_federation([Ffa(p=1.0, stats="kept")])
    fed.round()
    before = fed.client(0).tensors["kept"]["ffa"]
    # with 6 steps a round (24 samples in batches of 8, two epochs) 0.99⁶ of the start is left, then 0.99¹²
    assert float(before["left"]["stage1"]) == pytest.approx(0.99**6, rel=1e-5)
    fed.round()
    assert float(fed.client(0).tensors["kept"]["ffa"]["left"]["stage1"]) == pytest.approx(0.99**12, rel=1e-5)


def test_reset_statistics_start_anew(open_round: Any) -> None:
    for rounds_before in (0, 2):
        opened = open_round(Ffa(p=1.0, stats="reset"), rounds_before=rounds_before)
        start = opened.slot.scratch["ffa"]["stats"]["stage1"]
        assert torch.equal(start["mean"], torch.zeros(4))
        assert torch.equal(start["std"], torch.ones(4))
    assert not opened.fed.client(0).tensors["kept"]["ffa"]


def test_averaged_statistics_start_from_the_mean_of_the_clients(open_round: Any) -> None:
    fed = tiny_federation([Ffa(p=1.0, stats="averaged")])
    uploads = []
    real = Ffa.finish

    def spy(self: Ffa, c: Any) -> Any:
        out = real(self, c)
        uploads.append(out[1]["stats"]["stage1"]["mean"].clone())
        return out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ffa, "finish", spy)
        fed.round()
    assert len(uploads) == 3                                     # client 2 made no step
    mean = (uploads[0] + uploads[1] + uploads[2]) / 3
    opened = open_round(fed=fed, number=2)                       # even who never took part starts from it
    torch.testing.assert_close(opened.slot.scratch["ffa"]["stats"]["stage1"]["mean"], mean)


@pytest.mark.parametrize("stats", ["kept", "reset", "averaged"])
def test_bias_correction_forgets_the_start(stats: str) -> None:
    """If a client's statistics are always m, then t = (1 − L)·m + L·start, L what is left of the start; (t − L·start)/(1 − L) = m.

    Two clients see constant statistics (1, 3) and (3, 5) with different numbers of updates. Corrected, the variance over
    clients is ((1 − 2)² + (3 − 2)²)/2 = 1 for the mean and 1 for the deviation, in every round and at every momentum.
    """
    part = Ffa(p=1.0, momentum=0.9, stats=stats, bias_correct=True)
    spec: Any = SimpleNamespace(layout=Layout(stages=("q",)), shapes={"q": (1, 2, 2)})
    shared, kept = part.init_shared(spec), [part.init_kept(spec), part.init_kept(spec)]
    seen, updates = [(1.0, 3.0), (3.0, 5.0)], [2, 7]
    for _ in range(3):
        uploads = []
        for i in range(2):
            scratch = part.init_scratch(SimpleNamespace(kept=kept[i], shared=shared, spec=spec))  # type: ignore[arg-type]
            for _ in range(updates[i]):
                new = {kind: 0.9 * old + 0.1 * s for (kind, old), s in zip(scratch["stats"]["q"].items(), seen[i])}
                notes = {"q": {"stats": new, "left": 0.9 * scratch["left"]["q"]}}
                scratch = part.track(SimpleNamespace(scratch=scratch, notes=notes))  # type: ignore[arg-type]
            new, up = part.finish(SimpleNamespace(scratch=scratch, kept=kept[i]))  # type: ignore[arg-type]
            kept[i] = new or kept[i]
            uploads.append(up)
        reduced = {home: {"q": torch.stack([u[home]["q"] for u in uploads])} if home == "left" else
                   {"q": {k: torch.stack([u["stats"]["q"][k] for u in uploads]) for k in ("mean", "std")}} for home in uploads[0]}
        shared, _ = part.server(SimpleNamespace(shared=shared, reduced=reduced, ids=[0, 1]))  # type: ignore[arg-type]
        if stats != "averaged":             # averaged starts mix both clients' statistics, so only their centre is fixed
            assert float(shared["variance"]["q"]["mean"]) == pytest.approx(1.0, rel=1e-4)
            assert float(shared["variance"]["q"]["std"]) == pytest.approx(1.0, rel=1e-4)
        else:
            start = shared["start"]
            left = float(start["left"]["q"])
            centre = (float(start["stats"]["q"]["mean"])) / (1 - left)
            assert 1.0 < centre < 3.0       # a weighted mean of 1 and 3: a second correction of the same start would leave this
    assert 0 < float(shared["variance"]["q"]["mean"]) <= 1.0 + 1e-4


def test_uncorrected_statistics_measure_step_counts() -> None:
    """Why the option exists: two clients with the same statistics (1, 1) but 1 and 7 updates differ in what they upload."""
    t = [1 - 0.9**n for n in (1, 7)]                             # from 0 towards 1
    stats = {"q": {"mean": torch.tensor(t)[:, None], "std": torch.ones(2, 1)}}
    shared = {"variance": {"q": {"mean": torch.ones(1), "std": torch.ones(1)}}}
    plain, _ = Ffa(momentum=0.9).server(SimpleNamespace(shared=shared, reduced={"stats": stats}, ids=[0, 1]))  # type: ignore[arg-type]
    assert float(plain["variance"]["q"]["mean"]) == pytest.approx((t[1] - t[0]) ** 2 / 4)
    left = {"q": torch.tensor([0.9, 0.9**7])}
    fair, _ = Ffa(momentum=0.9, bias_correct=True).server(
        SimpleNamespace(shared=shared, reduced={"stats": stats, "left": left}, ids=[0, 1]))  # type: ignore[arg-type]
    assert float(fair["variance"]["q"]["mean"]) == pytest.approx(0.0, abs=1e-9)


# ---- the server ----------------------------------------------------------------------------------------------------

def serve(part: Ffa, stats: list[list[float]], ids: list[int]) -> dict[str, Any]:
    rows = torch.tensor(stats)
    shared = {"variance": {"q": {"mean": torch.full((2,), 7.0), "std": torch.full((2,), 7.0)}}}
    reduced = {"stats": {"q": {"mean": rows, "std": rows}}}
    return part.server(SimpleNamespace(shared=shared, reduced=reduced, ids=ids))[0]["variance"]["q"]  # type: ignore[arg-type]


def test_variance_over_clients_by_hand() -> None:
    """Three clients, two channels: channel 1 shows 1, 2, 3 and channel 2 shows 0, 0, 6.

    Eq. 5, per channel over M clients: ((1−2)² + 0 + (3−2)²)/3 = 2/3, and (4 + 4 + 16)/3 = 8.
    Release: one unbiased variance of all six numbers, whose mean is 2: (1 + 0 + 1 + 4 + 4 + 16)/5 = 5.2, for every channel.
    """
    stats = [[1.0, 0.0], [2.0, 0.0], [3.0, 6.0]]
    torch.testing.assert_close(serve(Ffa(), stats, [0, 1, 3])["mean"], torch.tensor([2 / 3, 8.0]))
    torch.testing.assert_close(serve(Ffa(sharing="scalar"), stats, [0, 1, 3])["std"], torch.tensor([5.2, 5.2]))


def test_a_single_client_leaves_the_last_variance() -> None:
    assert torch.equal(serve(Ffa(), [[1.0, 2.0]], [4])["mean"], torch.full((2,), 7.0))


def test_released_sharing_gives_gamma_one_in_a_run() -> None:
    fed = run_tiny([Ffa(p=1.0, sharing="scalar")])
    for over in fed.shared["ffa"]["variance"]["stage1"].values():
        assert torch.equal(over, over[:1].expand(4))
        v = torch.tensor([1.0, 2.0, 3.0, 4.0])
        torch.testing.assert_close(Ffa(sharing="scalar")._spread(v, over).square(), 2 * v)


# ---- where it stands -----------------------------------------------------------------------------------------------

class TwoStages(nn.Module):
    """No normalisation, so that batches of one are possible."""

    def __init__(self, last_pool: int = 1) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.AvgPool2d(2))
        self.b = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(last_pool))
        self.flat, self.head = nn.Flatten(), nn.Linear(3 * (4 // last_pool) ** 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.flat(self.b(self.a(x))))


def two_stages(part: Ffa, sizes: tuple[int, ...] = (16, 9), last_pool: int = 1) -> Federation:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = TwoStages(last_pool)
    return Federation(net, Layout(head="head", stages=("a", "b")), Method([part]), tiny_population(sizes),
                      Policy(batch=8, last_batch="keep", lr=0.05), Sequential)


def test_a_batch_of_one_is_left_alone(open_round: Any) -> None:
    """Client 1 has nine samples: batches of eight and of one. One sample has no variance over the batch."""
    fed = two_stages(Ffa(p=1.0))
    full, single = open_round(fed=fed, number=1).rest()
    assert len(single.batch.x) == 1
    assert not torch.equal(full.trace.before["a"], full.trace.after["a"])
    assert torch.equal(single.trace.before["a"], single.trace.after["a"])
    for q in ("a", "b"):
        assert float(single.after["scratch"]["ffa"]["left"][q]) == float(full.after["scratch"]["ffa"]["left"][q])
    assert single.loss.isfinite()


@pytest.mark.parametrize(("stages", "touched"), [((), ("a", "b")), ((1,), ("a",)), ((2,), ("b",)), ((1, 2), ("a", "b"))])
def test_any_subset_of_stages(open_round: Any, stages: tuple[int, ...], touched: tuple[str, ...]) -> None:
    fed = two_stages(Ffa(p=1.0, stages=stages))
    taken = open_round(fed=fed).step()
    changed = tuple(q for q in ("a", "b") if q in taken.trace.before
                    and not torch.equal(taken.trace.before[q], taken.trace.after[q]))
    assert changed == touched
    assert tuple(fed.shared["ffa"]["variance"]) == touched


def test_stages_draw_their_own_noise_and_coins(open_round: Any) -> None:
    trace = open_round(fed=two_stages(Ffa(p=1.0, sharing="random"))).step().trace
    one, other = (noise_in(trace.before[q].detach(), trace.after[q].detach())[:, :, :2] for q in ("a", "b"))
    assert not torch.allclose(one, other, atol=0.1)
    coins = [tuple(tossed(taken, q) for q in ("a", "b"))
             for number in (0, 1) for taken in open_round(fed=two_stages(Ffa(p=0.5), (80, 80)), number=number).rest()]
    assert {True, False} == {a == b for a, b in coins}


@pytest.mark.parametrize("p", [0.2, 0.8])
def test_coin_has_the_chance_asked_for(p: float) -> None:
    """400 keys: p ± 0.07 is three and a half deviations."""
    ones = {"mean": torch.ones(2), "std": torch.ones(2)}
    x = rng.normal(rng.key(0, "x"), (2, 2, 2, 2))
    on = [float(Ffa(p=p).tap(view_of(ones, n), "q", x)[1]["left"]) < 1 for n in range(400)]
    assert sum(on) / 400 == pytest.approx(p, abs=0.07)


def test_unfit_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="asks for \\[3\\], but the model has stages 1 to 2"):
        two_stages(Ffa(stages=(3,)))
    with pytest.raises(ConfigError, match="at least two positions"):
        two_stages(Ffa(), last_pool=4)
    two_stages(Ffa(stages=(1,)), last_pool=4)                    # the large map alone is fine
    with pytest.raises(ConfigError, match="no convolution stages"):
        Ffa()._chosen(Layout())


def test_what_travels_is_two_numbers_per_channel_each_way() -> None:
    """stage1 has 4 channels: up 2·4 floats of statistics, down 2·4 of variances, for each of three clients that train."""
    plain, augmented = tiny_federation(), tiny_federation([Ffa(p=1.0)])
    first = [fed.round() for fed in (plain, augmented)]
    second = [fed.round() for fed in (plain, augmented)]
    assert second[1].bytes_up - second[0].bytes_up == 3 * 8 * 4
    assert second[1].bytes_down - second[0].bytes_down == 3 * 8 * 4
    assert first[1].bytes_up - first[0].bytes_up == 3 * 8 * 4


def test_a_kernel_can_fold_the_key_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[int, int]] = []
    tap = Ffa.tap

    def watched(part: Ffa, v: Any, point: str, x: torch.Tensor) -> Any:
        base, counter, number = v.unfolded(point)
        folded = rng.fold(base if counter is None else rng.fold(base, counter[0]), number)
        keys.append((int(folded), int(v.key(point))))
        return tap(part, v, point, x)
    monkeypatch.setattr(Ffa, "tap", watched)
    fed = run_tiny([Ffa(p=1.0)], rounds=1)
    steps = len(keys)
    fed.look(0, fed.client(0), fed.model, fed.samples.x[:4].float(), False, True)             # has no counter
    assert steps > 4
    assert len(keys) > steps
    assert all(one == other for one, other in keys)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("stats", ["reset", "kept"])
def test_a_look_as_in_training_starts_from_the_rounds_scratch(stats: str) -> None:
    """Of the start, on which a share of 1 is left, one step leaves the momentum; what a client keeps goes on from its own share."""
    part = Ffa(p=1.0, stats=stats)
    fed = tiny_federation([part], epochs=1)
    fed.round()
    state = fed.client(0)
    before = state.tensors["kept"].get("ffa", {}).get("left")
    looked, plain = (fed.look(0, state, fed.model, fed.samples.x[:6], True, taps) for taps in (True, False))
    assert not torch.equal(looked.logits, plain.logits)
    for point, note in looked.notes["ffa"].items():
        left = torch.ones_like(note["left"]) if before is None else before[point]
        torch.testing.assert_close(note["left"], part.momentum * left)
    assert looked.notes["ffa"]
    assert not plain.notes
